"""The chart's dashboard and alerts use metrics and labels that a gateway has, including Envoy's."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from stoker_gateway.keys import manifests
from stoker_gateway.keys.key import Key, digest_of

from ..operator.test_dashboards import CHART, expressions
from ..support import golden
from .behind_envoy import CHAT
from .test_gateway import command

#: Labels that Prometheus adds to samples from pods. The registry's age is only reported in a cluster.
ADDED = {"namespace", "pod"}
IN_CLUSTER = "stoker:gateway_directory_age_seconds"
#: Metrics without samples here, because no request waits or is held; they have labels.
WITHOUT_SAMPLES = {
    "stoker:gateway_queue_seconds": {"le", "model"},
    "stoker:gateway_held_seconds": {"le", "model", "outcome"},
}
HELD = "stoker:gateway_held_requests"


async def scraped(tmp_path: Path) -> dict[str, set[str]]:
    """Return the samples of a gateway that has served requests, and their labels."""
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(manifests.write(Key("team", digest_of("sk-team")))))
    words = ("--keys", str(tmp_path / "keys.yaml"), "--metrics-port", "0")
    async with command(*words) as run, aiohttp.ClientSession() as client:
        for key in ("sk-team", "sk-wrong"):
            async with client.post(run.url + CHAT, data=b'{"model": "m"}', headers={"x-api-key": key}) as answer:
                await answer.read()
        assert run.process.stderr is not None
        log = b""
        while not (found := re.search(rb"http://\S+/metrics", log)):
            log += await asyncio.wait_for(run.process.stderr.readline(), 120)
        samples: dict[str, set[str]] = {IN_CLUSTER: set()}
        while "stoker:gateway_key_requests_total" not in samples:  # Envoy reports completed requests within a second
            async with client.get(found[0].decode()) as answer:
                text = await answer.text()
            for name, labels in re.findall(r"^([a-z][\w:]*)(\{.*\})? ", text, re.MULTILINE):  # as in Prometheus
                samples.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
        assert all(f"# TYPE {name} histogram" in text for name in WITHOUT_SAMPLES) and f"# TYPE {HELD} gauge" in text
        golden.check("gateway-metrics.txt", golden.series(text, ("stoker:",)))
        buckets = {f"{name}_bucket": labels for name, labels in WITHOUT_SAMPLES.items()}
        return {HELD: {"model"}, **buckets, **samples}


def test_dashboard_and_alerts_query_existing_metrics(tmp_path: Path) -> None:
    there = asyncio.run(scraped(tmp_path))
    dashboard: Any = json.loads((CHART / "dashboards/gateway.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 10
    (group,) = yaml.safe_load((CHART / "files/gateway-alerts.yaml").read_text())
    alerts = group["rules"]
    for expression in [*expressions(dashboard), *(alert["expr"] for alert in alerts)]:
        names = set(re.findall(r"\b(?:stoker:|envoy_|process_)\w+(?=[{,)\[ ]|$)", expression))
        names -= {"envoy_http_conn_manager_prefix", "envoy_response_code_class", "envoy_cluster_name"}  # labels
        assert names, expression
        assert names <= there.keys(), (expression, names - there.keys())
        by = {label for found in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", found)}
        labels = set(re.findall(r"(\w+)(?:=~?|!=)\"", expression)) | by
        assert labels <= ADDED.union(*(there[name] for name in names)), (expression, labels)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        summed = re.search(r"by \(([^)]*)\)", alert["expr"])
        remaining = re.split(r",\s*", summed[1]) if summed else []
        assert set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))) <= set(remaining)

"""`stoker render` applies the chart's defaults and a values file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.api.quantity import amount, canonical
from stoker_operator.api.violation import Refused
from stoker_operator.cli.render import main
from stoker_operator.policy.chart_policy import DEFAULTS, chart_policy, read_values
from stoker_operator.policy.policy import Policy

ROOT = Path(__file__).parents[3]
VALUES = yaml.safe_load((ROOT / "charts/stoker/values.yaml").read_text())


def test_default_policy_equals_the_charts_values() -> None:
    for name, part in DEFAULTS.items():
        assert {key: VALUES[name][key] for key in part} == part, name


def test_default_policy_equals_the_charts_config_map() -> None:
    golden = yaml.safe_load_all((ROOT / "e2e/apiserver/golden/chart-default.yaml").read_text())
    [text] = [each["data"]["policy.yaml"] for each in golden if "policy.yaml" in (each.get("data") or {})]
    assert chart_policy({}, "stoker", "default") == Policy.of(yaml.safe_load(text), "golden")


def test_values_file_changes_the_policy(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "values.yaml"
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
    file.write_text(yaml.safe_dump({"networkPolicy": {"prometheus": None, "gateway": [peer]}, "image": {"tag": "x"}}))
    words = ["-f", str(ROOT / "examples/01-demo.yaml"), "--values", str(file), "--release=r", "--release-namespace=ns"]
    assert main(words) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    _, operator, third_peer = objects["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ns"}
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "r"
    assert third_peer == peer


def test_empty_values_have_the_charts_defaults() -> None:
    empty = {"policy": {"podIds": None}, "monitoring": {"endpointLabels": None}, "networkPolicy": {"gateway": None}}
    assert chart_policy(empty, "r", "ns") == chart_policy({}, "r", "ns")


@pytest.mark.parametrize("content", ["[1]", "a: [", "networkPolicy: 3", "policy: {template: Most}"])
def test_malformed_values_are_refused(content: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(content)
    assert main(["-f", str(ROOT / "examples/01-demo.yaml"), "--values", str(file)]) == 2
    assert "values" in capsys.readouterr().err
    with pytest.raises(Refused):
        read_values(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("1024Mi", "1Gi"), ("0.5Gi", "512Mi"), ("1Gi", "1Gi"), ("1500Mi", "1500Mi"), ("1000m", "1"), ("500m", "500m"),
        ("1.5", "1500m"), (4, "4"), ("0", "0"), ("0Gi", "0"), ("1000", "1k"), ("2000M", "2G"), ("1e3", "1e3"),
        ("10e3", "10e3"), ("1E", "1E"), ("0.5Ki", "512"), ("3072", "3072"), ("4000Mi", "4000Mi"), ("1.5Gi", "1536Mi"),
    ],
)  # fmt: skip
def test_amounts_are_written_as_by_the_api_server(written: int | str, stored: str) -> None:
    assert canonical(written) == stored == canonical(stored)
    assert amount(stored) == amount(written)

"""Several front ends answer like one, whichever of them accepts a connection."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ....support.certificates import self_signed
from ....support.waiting import until
from .running import Running, crashing_engine, serving

#: Metrics whose values depend on time or on the number of processes.
_VARYING = re.compile(r"(process|python)_|.*(seconds|_time|_created|throughput).*")

_PATHS = ("/health", "/ready", "/live", "/ping", "/load", "/version", "/copies", "/v1/models", "/openapi.json")


def _requests(running: Running) -> None:
    for number in range(8):
        running.text([5, 6, 7 + number], max_tokens=3 + number)
        running.post(prompt=[5] * 600, max_tokens=1)  # too long
        running.get("/v1/models")
        running.get("/no/such/path")
    "".join(running.stream([5, 6], 30))
    running.until_idle()


def _values(running: Running) -> dict[tuple[str, ...], float]:
    text = running.get("/metrics").text
    return {
        (sample.name, *map(str, sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not _VARYING.match(sample.name) or (sample.name.endswith("_count") and "vllm" not in sample.name)
    }


def test_two_front_ends_answer_like_one(tiny_llama: Path, tmp_path: Path) -> None:
    """One of the two is replaced between requests. Their metrics are those of one front end after the same requests."""
    words = ("--served-model-name=m",)
    default = "from stoker_engine.async_llm import AsyncLLM; AsyncLLM.__init__.__kwdefaults__['program']"
    one_setup = f"{crashing_engine(tmp_path / 'one')}; {default} = engine_links.PROGRAM"
    with serving(tiny_llama, *words, setup=one_setup) as one:
        _requests(one)
        _requests(one)
        expected = _values(one)
    with serving(tiny_llama, *words, "--api-server-count=2", setup=crashing_engine(tmp_path / "two")) as two:
        _requests(two)
        before = _values(two)
        two.replace(two.front_ends()[0])
        assert _values(two) == before, "metrics do not depend on the front ends that live"
        _requests(two)
        assert _values(two) == expected
        for path in _PATHS:
            answers = [two.get(path) for _ in range(50)]
            assert {(answer.status_code, answer.text) for answer in answers} == {(200, answers[0].text)}
        assert not two.has_logged("Traceback")
    assert len(expected) > 50


def test_https_api_keys_and_a_root_path_work_at_every_front_end(tiny_llama: Path, tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    words = (
        *("--api-server-count=2", "--served-model-name=m", "--root-path=/below", "--log-format=json"),
        *(f"--ssl-keyfile={key}", f"--ssl-certfile={certificate}", f"--api-key-file={keys}"),
    )
    context = ssl.create_default_context(cafile=certificate)
    with serving(tiny_llama, *words, setup=crashing_engine(tmp_path / "deaths")) as running:
        assert running.url.startswith("https://")
        path, body = f"{running.url}/below/v1/completions", {"prompt": [5, 6], "max_tokens": 4}

        client = httpx.Client(headers={"connection": "close"}, verify=context, timeout=120)

        def codes(key: str) -> set[int]:
            headers = {"authorization": f"Bearer {key}"}
            return {client.post(path, json=body, headers=headers).status_code for _ in range(12)}

        assert codes("open") == {401}
        assert codes("sesame") == {200}
        keys.write_text("changed\n")
        until(lambda: codes("sesame") == {401}, "each front end reads the file again")
        assert codes("changed") == {200}
        assert "sesame" not in "".join(running.log)

"""``stoker plan``: a table to read, JSON to compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from stoker_operator.cli.plan import main

ROOT = Path(__file__).parents[3]


def test_the_options_are_shown_with_the_one_that_is_taken(capsys: Any) -> None:
    assert main(["-f", str(ROOT / "examples/02-four-gpus.yaml")]) == 0
    out = capsys.readouterr().out
    assert "nvidia-a100-80gb (81,920 MiB each)" in out
    assert "  2    2   ← chosen" in out


def test_json_says_the_same(capsys: Any) -> None:
    assert main(["-f", str(ROOT / "examples/02-four-gpus.yaml"), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["accepted"] is True
    assert answer["errors"] == []
    assert [(each["tensor"], each["data"], each["verdict"]) for each in answer["options"]] == [
        (4, 1, "possible"),
        (2, 2, "chosen"),
        (1, 4, "possible"),
    ]


def test_a_refusal_is_json_too(tmp_path: Any, document: Any, capsys: Any) -> None:
    hardware = {"accelerator": "nvidia-a100-80gb", "count": 4}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(document(hardware=hardware, parallelism={"tensor": 2, "data": 3})))
    assert main(["-f", str(tmp_path / "m.yaml"), "-o", "json"]) == 2
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert answer["accepted"] is False
    assert answer["errors"] == [
        {
            "field": "spec.parallelism",
            "message": "tensor (2) × data (3) needs 6 GPUs but hardware.count is 4",
            "remedy": "use tensor 4, data 1 or tensor 2, data 2 or tensor 1, data 4, or set hardware.count to 6",
        }
    ]
    assert output.err.startswith("stoker plan: spec.parallelism: tensor (2) × data (3) needs 6 GPUs")


def test_one_endpoint_at_a_time(tmp_path: Any, document: Any, capsys: Any) -> None:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump_all([document(), document()]))
    assert main(["-f", str(tmp_path / "m.yaml")]) == 2
    assert "it holds several endpoints (demo, demo); put one in a file" in capsys.readouterr().err

"""The examples of adapters work as described."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from stoker_common.errors import AdapterError
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.server.adapters.config_file import parse

from .conftest import FakeEngine, serving_fake, wait_until

EXAMPLES = Path(__file__).parents[3] / "examples/lora"
GUIDE = Path(__file__).parents[3] / "docs/guides/lora.md"


def test_the_example_files_of_adapters_are_valid() -> None:
    assert parse((EXAMPLES / "adapters.yaml").read_bytes()) == [
        LoRAModule("support", "/adapters/support-v3"),
        LoRAModule("org/summaries", "/adapters/summaries", "gemma-3-270m"),
    ]
    block = GUIDE.read_text().split("```yaml\n")[1].split("```")[0]
    assert parse(block.encode()) == [LoRAModule("support", "/adapters/support-v3")]


def test_the_example_loads_queries_and_unloads_an_adapter(engine: FakeEngine, tmp_path: Path) -> None:
    ask = runpy.run_path(str(EXAMPLES / "load_and_ask.py"))["ask"]
    (tmp_path / "keys").write_text("admin")
    (tmp_path / "a").mkdir()
    (tmp_path / "bad").mkdir()
    engine.bad_adapters["bad"] = AdapterError("another base model")
    flags = {"admin_api_key_file": str(tmp_path / "keys"), "lora_dir": (str(tmp_path),), "api_key": ("user",)}
    with serving_fake(engine, enable_lora=True, allow_runtime_lora_updating=True, **flags) as served:
        wait_until(lambda: served.service.is_loaded)
        assert ask(served.url, "admin", "user", "support", str(tmp_path / "a"), "Hello?") == "hello world"
        assert engine.adapters_asked == [0]
        assert not engine.adapters
        with pytest.raises(SystemExit, match="another base model"):
            ask(served.url, "admin", "user", "support", str(tmp_path / "bad"), "Hello?")
        with pytest.raises(SystemExit, match="--admin-api-key-file"):
            ask(served.url, "user", "user", "support", str(tmp_path / "a"), "Hello?")

"""Changes of the file of adapters."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import AdapterError, ArgumentError, EngineDeadError, RequestError
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.server.adapters.config_file import AdapterConfigFile, parse
from stoker_engine.server.adapters.folders import AdapterFolders
from stoker_engine.server.adapters.registry import LOADS_AT_ONCE, AdapterRegistry, AdapterState, Origin
from stoker_engine.server.unavailable import NotStartedError

from ....support.waiting import until_async
from ..conftest import FakeEngine


class Listed:
    """A file of adapters, and folders for them."""

    def __init__(self, root: Path, engine: FakeEngine) -> None:
        self.root = root
        self.file = root / "adapters.yaml"
        self.registry = AdapterRegistry(engine, ("tiny",))
        for name in "abc":
            (root / "dir" / name).mkdir(parents=True)

    def write(self, **adapters: str) -> None:
        """List adapters: names and folders."""
        listed = [{"name": name, "path": str(self.root / folder)} for name, folder in adapters.items()]
        self.replace(json.dumps({"adapters": listed}))

    def replace(self, text: str) -> None:
        new = self.root / "new"
        new.write_text(text)
        new.replace(self.file)

    def config(self) -> AdapterConfigFile:
        return AdapterConfigFile(self.file, self.registry, AdapterFolders([str(self.root / "dir")]), interval_s=0.001)

    @property
    def served(self) -> dict[str, str]:
        return {each.module.name: Path(each.source.path).name for each in self.registry}

    async def until_served(self, **adapters: str) -> None:
        await until_async(lambda: self.served == adapters, lambda: self.served)


@pytest.fixture
def listed(tmp_path: Path, engine: FakeEngine) -> Listed:
    return Listed(tmp_path, engine)


def _watched(listed: Listed, run: Callable[[AdapterConfigFile], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        config = listed.config()
        assert not config.is_settled
        watching = asyncio.create_task(config.watch())
        try:
            await until_async(lambda: config.is_settled)
            await run(config)
        finally:
            watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_changes_of_the_file_reach_the_engine(listed: Listed, engine: FakeEngine) -> None:
    listed.write(one="dir/a", two="dir/b")

    async def run(_: AdapterConfigFile) -> None:
        assert listed.served == {"one": "a", "two": "b"}
        with listed.registry.hold("one") as old:
            listed.write(one="dir/c", three="dir/b")
            await listed.until_served(one="c", three="b")
            assert old in engine.adapters, "a request still uses the adapter"
        assert old not in engine.adapters
        listed.replace("adapters: []")
        await listed.until_served()
        assert not engine.adapters
        assert len(engine.adapter_loads) == 4

    _watched(listed, run)


def test_failed_adapters_have_a_reason_and_are_retried(
    listed: Listed, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.bad_adapters["b"] = AdapterError("another base model")
    listed.write(one="dir/a", two="dir/b", three="elsewhere", four="dir/nothing", tiny="dir/a")

    async def run(_: AdapterConfigFile) -> None:
        registry = listed.registry
        assert listed.served == {"one": "a"}
        assert [registry.count(state) for state in AdapterState] == [1, 0, 4]
        for name, reason in (("two", "another base model"), ("three", "--lora-dir"), ("four", "does not exist")):
            with pytest.raises(NotStartedError, match=reason):
                registry.check(name)
            assert f"cannot load the LoRA adapter {name}" in caplog.text
        engine.bad_adapters.clear()
        listed.write(one="dir/a", two="dir/b")
        await listed.until_served(one="a", two="b")
        assert registry.count(AdapterState.FAILED) == 0

    _watched(listed, run)


def test_a_failed_path_leaves_the_served_adapter(listed: Listed, engine: FakeEngine) -> None:
    listed.write(one="dir/a")

    async def run(_: AdapterConfigFile) -> None:
        engine.bad_adapters["b"] = AdapterError("another base model")
        listed.write(one="dir/b", two="dir/c")
        await listed.until_served(one="a", two="c")
        listed.registry.check("one")

    _watched(listed, run)


def test_adapters_lost_by_a_restarted_engine_are_loaded_again(listed: Listed, engine: FakeEngine) -> None:
    listed.write(one="dir/a", two="dir/b")

    async def run(_: AdapterConfigFile) -> None:
        lost = listed.registry.get("one")
        assert lost is not None
        engine.lost_adapters[lost.source.number] = "its files have changed"
        listed.write(one="dir/a", two="dir/b")
        await until_async(lambda: listed.registry.get("one") is not lost)
        listed.registry.check("one")
        assert len(engine.adapter_loads) == 3

    _watched(listed, run)


def test_an_unreadable_file_leaves_the_served_adapters(listed: Listed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    listed.write(one="dir/a")

    async def run(_: AdapterConfigFile) -> None:
        listed.replace("adapters: {")
        await until_async(lambda: "neither YAML nor JSON" in caplog.text)
        listed.file.unlink()
        await until_async(lambda: "No such file" in caplog.text)
        assert listed.served == {"one": "a"}
        assert len(caplog.records) == 2, "one line for each reason"
        listed.write(two="dir/a")
        await listed.until_served(two="a")

    _watched(listed, run)


def test_adapters_are_loaded_once_the_engine_is_back(listed: Listed, engine: FakeEngine) -> None:
    engine.bad_adapters["a"] = EngineDeadError("dead")
    listed.write(one="dir/a")

    async def main() -> None:
        config = listed.config()
        watching = asyncio.create_task(config.watch())
        try:
            await until_async(lambda: len(engine.adapter_loads) > 2)
            assert not config.is_settled
            engine.bad_adapters.clear()
            await listed.until_served(one="a")
            await until_async(lambda: config.is_settled)
        finally:
            watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_internal_error_stops_no_other_adapter(
    listed: Listed, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    engine.bad_adapters["a"] = RuntimeError("a bug")
    listed.write(one="dir/a", **{f"n{number}": "dir/b" for number in range(2 * LOADS_AT_ONCE)})

    async def run(_: AdapterConfigFile) -> None:
        assert len(listed.served) == 2 * LOADS_AT_ONCE
        with pytest.raises(NotStartedError, match=r"the adapter 'one' is not served: .*; see the log"):
            listed.registry.check("one")
        assert "a bug" in caplog.text

    _watched(listed, run)


def test_adapters_of_other_origins_are_left_alone(listed: Listed) -> None:
    asyncio.run(listed.registry.load(LoRAModule("one", "/a"), Origin.MODULES))
    listed.write(one="dir/b", two="dir/b")

    async def run(_: AdapterConfigFile) -> None:
        listed.replace("{}")
        listed.replace("adapters:")
        await listed.until_served(one="a")

    _watched(listed, run)


def test_a_failed_adapter_belongs_to_the_file(listed: Listed, engine: FakeEngine) -> None:
    listed.write(a="dir/missing")
    config = listed.config()
    other = LoRAModule("a", str(listed.root / "dir" / "b"))

    async def run() -> None:
        await config.apply()
        for in_place in (False, True):
            with pytest.raises(RequestError, match="is listed in --lora-config; change it there"):
                await listed.registry.load(other, Origin.RUNTIME, in_place=in_place)
        with pytest.raises(RequestError, match="is listed in --lora-config; change it there"):
            await listed.registry.unload("a", Origin.RUNTIME)
        with pytest.raises(NotStartedError):
            listed.registry.check("a")
        assert not listed.served

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_listed_name_taken_earlier_fails_until_it_is_free(listed: Listed, engine: FakeEngine) -> None:
    listed.write(a="dir/a")
    config = listed.config()
    other = LoRAModule("a", str(listed.root / "dir" / "b"))

    async def run() -> None:
        await listed.registry.load(other, Origin.RUNTIME)
        await config.apply()
        await listed.registry.load(other, Origin.RUNTIME, in_place=True)
        assert listed.served == {"a": "b"}
        await listed.registry.unload("a", Origin.RUNTIME)
        with pytest.raises(NotStartedError, match="taken by an adapter of"):
            listed.registry.check("a")
        await config.apply()
        assert listed.served == {"a": "a"}

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_unreadable_file_is_refused_at_start(listed: Listed) -> None:
    with pytest.raises(ArgumentError, match=r"--lora-config: cannot read .*No such file"):
        listed.config()
    listed.replace("adapters: 5")
    with pytest.raises(ArgumentError, match=r"--lora-config: cannot read .*must be a list"):
        listed.config()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "one field adapters"),
        ("[]", "one field adapters"),
        ("adapters: []\nother: 1", "one field adapters"),
        ("adapters: {a: b}", "must be a list"),
        ("adapters: [a]", "an adapter must be an object"),
        ("adapters: [{name: a}]", "requires the field path"),
        ("adapters: [{name: a, path: /a, rank: 8}]", "unknown field 'rank'"),
        ("adapters: [{name: 5, path: /a}]", "must be a string"),
        ("adapters: [{name: a, path: /a}, {name: a, path: /b}]", "two adapters have the name 'a'"),
        ("adapters: &a [*a]", "an adapter must be an object"),
        ("adapters: [!!python/object/apply:os.system [x]]", "neither YAML nor JSON"),
        ("adapters: " + "[" * 5000, "nested too deeply"),
        ("adapters: \x00", "neither YAML nor JSON"),
        ("adapters: 2000-13-45", "neither YAML nor JSON"),
    ],
)
def test_malformed_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text.encode())


def test_yaml_and_json_files_are_parsed_equally() -> None:
    expected = [LoRAModule("a", "/a", "base"), LoRAModule("b", "/b")]
    text = "adapters:\n- name: a\n  path: /a\n  base_model_name: base\n- {name: b, path: /b}\n"
    assert parse(text.encode()) == expected
    fields = [{"name": "a", "path": "/a", "base_model_name": "base"}, {"name": "b", "path": "/b"}]
    assert parse(json.dumps({"adapters": fields}).encode()) == expected

"""Loads of adapters that fail, and their messages."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest

from stoker_common.errors import AdapterError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.sched.adapter_loads import AdapterLoads
from stoker_engine.sched.adapters import AdapterTable
from stoker_engine.sched.policy import WaitingQueue

LOADED = LoadedAdapter("another digest", 8, 1, 0.1)


@pytest.mark.parametrize(
    "result, line",
    [
        (AdapterError("the file is damaged"), "LoRA adapter support: the file is damaged"),
        (RuntimeError("a bug"), "LoRA adapter support cannot be loaded"),
        (LOADED, "the files of LoRA adapter support in /adapters/3 have changed since it was loaded"),
    ],
)
def test_failed_load_is_logged_once_with_its_name(
    result: Exception | LoadedAdapter, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    ended = Future[LoadedAdapter]()
    ended.set_exception(result) if isinstance(result, Exception) else ended.set_result(result)
    loads = AdapterLoads(AdapterTable(1, 1, WaitingQueue()), lambda _: ended, lambda _: None)
    registration = loads.register(AdapterSource(0, "support", "/adapters/3", "digest"))
    loads.collect(lambda _: False)
    assert caplog.messages == [line]
    assert isinstance(registration.exception(timeout=0), AdapterError)

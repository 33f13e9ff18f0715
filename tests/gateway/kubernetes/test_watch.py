"""Whatever happens to watches, the known state converges to the actual state."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from kubernetes import client

from stoker_gateway.kubernetes.api import Api
from stoker_gateway.kubernetes.watch import Kind, Watch

from ...support.waiting import until
from .stand_in_api import ENDPOINTS, StandInApi, endpoint


@contextmanager
def watching(api: StandInApi) -> Iterator[Watch[tuple[str, str]]]:
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{api.port}"
    stop = threading.Event()

    def read(seen: dict[str, Any]) -> tuple[str, str] | None:
        model = seen["spec"]["model"]["source"]
        return None if model == "hf://org/hidden" else (seen["metadata"]["name"], model)

    watch = Watch(Api(client.ApiClient(configuration)), Kind("endpoints", ENDPOINTS), read, lambda: None)
    thread = threading.Thread(target=watch.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        with suppress(Exception):
            api.stop()
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(4))
def test_known_objects_converge_to_the_actual_ones(seed: int) -> None:
    rng = random.Random(seed)
    api = StandInApi()
    for number in range(rng.randrange(6)):
        api.put(ENDPOINTS, endpoint(f"e{number}"))
    api.start()
    with watching(api) as watch:
        for step in range(25):
            there = sorted(api.kinds[ENDPOINTS])
            match rng.randrange(8):
                case 0 | 1 | 2:
                    name = f"e{rng.randrange(8)}"
                    source = rng.choice(["hidden", "other", f"of-step-{step}"])
                    api.put(ENDPOINTS, {**endpoint(name), "spec": {"model": {"source": f"hf://org/{source}"}}})
                case 3 if there:
                    api.delete(ENDPOINTS, *rng.choice(there))
                case 4:
                    api.break_off()
                case 5:
                    api.expire()
                    if rng.random() < 0.5:
                        api.break_off()
                case 6:
                    api.stop()
                    if there:
                        api.delete(ENDPOINTS, *rng.choice(there))
                    api.start()
                case 7:
                    until(lambda: api.watchers(ENDPOINTS))
                    answer = {"kind": "Status", "code": rng.choice([410, 500, 504, "x"]), "message": "ended"}
                    broken = {"type": rng.choice(["ERROR", "BOOKMARK"]), "object": rng.choice([answer, {}])}
                    api.say(ENDPOINTS, rng.choice([broken, {"type": "ADDED"}]))
            if rng.random() < 0.3:  # lets the watch catch up before the next change, sometimes
                heard = watch.age_s
                until(lambda heard=heard: heard() == 0)

        def same() -> bool:
            sources = {at: each["spec"]["model"]["source"] for at, each in api.kinds[ENDPOINTS].items()}
            return watch.items() == {
                at: (at[1], source) for at, source in sources.items() if source != "hf://org/hidden"
            }

        until(same, f"{watch.items()} is not {sorted(api.kinds[ENDPOINTS])}")
        until(lambda: watch.age_s() == 0)


def test_missing_permission_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    api = StandInApi()
    api.refused[ENDPOINTS] = 403
    api.put(ENDPOINTS, endpoint("a"))
    api.start()
    with watching(api) as watch:
        until(lambda: len(api.requests) >= 3)
        assert not watch.listed and watch.age_s() > 0
        del api.refused[ENDPOINTS]
        until(lambda: watch.listed)
        assert list(watch.items()) == [("one", "a")]
        again = "endpoints can be watched again"
        until(lambda: again in caplog.messages, lambda: caplog.messages)  # logged after the list
        refused = (
            "endpoints cannot be watched: refused with 403; allow the gateway's service account to list and watch"
            " them; the gateway is not ready until they can be"
        )
        assert caplog.messages.count(refused) == 1 and caplog.messages[-1] == again, caplog.messages


def test_missing_permission_to_watch_is_logged_once_although_lists_succeed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    api = StandInApi()
    api.refused_watches[ENDPOINTS] = 403
    api.start()
    with watching(api):
        until(lambda: api.requests.count((ENDPOINTS, True)) >= 3)
        logged = [each for each in caplog.messages if each.startswith("endpoints ")]
        assert len(logged) == 1 and logged[0].startswith("endpoints cannot be watched: refused with 403"), logged
        del api.refused_watches[ENDPOINTS]
        until(lambda: "endpoints can be watched again" in caplog.messages, lambda: caplog.messages)

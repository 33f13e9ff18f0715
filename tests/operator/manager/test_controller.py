"""The assembled operator: which endpoints a round of lists wakes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.hub_configs import Model
from stoker_operator.cluster.kube import KubeError, Listing
from stoker_operator.manager import controller as controller_module
from stoker_operator.manager import reconciler as reconciler_module
from stoker_operator.manager.controller import Controller
from stoker_operator.objects.facts import Key
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.apply import NotLeading
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import GatewaySettings, LeaseSettings, Settings

from ...support.virtual_time import elapse
from ...support.waiting import until_async

ENDPOINT: dict[str, Any] = {
    "kind": KIND,
    "metadata": {"name": "demo", "namespace": "ns", "resourceVersion": "1"},
    "spec": {},
}


class Kube:
    """A cluster with one endpoint; its lists may fail."""

    def __init__(self) -> None:
        self.pod_monitors = self.broken = False
        self.failures = self.rounds = 0
        self.endpoint = ENDPOINT

    def serves(self, kind: str) -> bool:
        return kind != "PodMonitor" or self.pod_monitors

    def list(self, kind: str, namespace: str, labels: Any) -> Listing:
        self.rounds += kind == KIND
        if self.broken and kind != KIND:
            self.failures += 1
            raise KubeError(500, "not now")
        return Listing([self.endpoint] if kind == KIND else [], "50")

    async def listed_again(self) -> None:
        """Wait for three more rounds of lists, so that the results of the first one have been acted on."""
        before = self.rounds
        await until_async(lambda: self.rounds >= before + 3)


def test_pod_monitors_found_in_a_failed_round_count_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kube: Any = Kube()
        controller = Controller(Settings(health_address="127.0.0.1:0", resync_seconds=0.02), kube, Catalogue.load())
        woken: list[Key] = []
        monkeypatch.setattr(controller._tasks, "wake", woken.append)
        monkeypatch.setattr(controller._tasks, "keys", lambda: {Key("ns", "demo")})
        await controller.start()
        assert woken == [Key("ns", "demo")]  # it leads
        kube.broken = kube.pod_monitors = True
        await until_async(lambda: kube.failures >= 2)
        assert len(woken) == 1
        kube.broken = False
        await until_async(lambda: len(woken) == 2)
        await kube.listed_again()
        assert len(woken) == 2, "the endpoint is woken once"
        await controller.stop()

    asyncio.run(main())


@pytest.mark.parametrize("broken", [False, True], ids=["complete round", "failed round"])
def test_changes_found_by_lists_wake_their_endpoints_once(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kube: Any = Kube()
        controller = Controller(Settings(health_address="127.0.0.1:0", resync_seconds=0.02), kube, Catalogue.load())
        woken: list[Key] = []
        monkeypatch.setattr(controller._tasks, "wake", woken.append)
        monkeypatch.setattr(controller._tasks, "keys", lambda: {Key("ns", "demo")})
        await controller.start()
        woken.clear()
        kube.broken = broken
        kube.endpoint = {**ENDPOINT, "metadata": {**ENDPOINT["metadata"], "resourceVersion": "2"}}
        await until_async(lambda: woken)
        controller.on_event(KIND, "MODIFIED", kube.endpoint)
        await kube.listed_again()
        assert woken == [Key("ns", "demo")], "the endpoint is woken once"
        await controller.stop()

    asyncio.run(main())


@pytest.mark.parametrize("arrives", [True, False], ids=["config arrives", "config does not arrive"])
def test_review_waits_briefly_for_a_pending_config(
    arrives: bool, virtual_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        controller = Controller(Settings(), Kube(), Catalogue.load())  # type: ignore[arg-type]
        controller._loop = loop = asyncio.get_running_loop()
        pending = True
        monkeypatch.setattr(controller._configs, "get", lambda *_, **__: None)
        monkeypatch.setattr(controller._configs, "pending", lambda *_: pending)
        document: Any = {**ENDPOINT, "apiVersion": "stoker.dev/v1alpha1"}
        await controller._reviews.await_config(document)
        document["spec"] = {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}}
        await controller._reviews.await_config(document)
        assert loop.time() == 0
        document["spec"]["model"] = {"source": "hf://org/model"}
        waiting = asyncio.create_task(controller._reviews.await_config(document))
        await elapse(1)
        assert not waiting.done()
        pending = not arrives
        controller._on_hub_attempt(Model("org/model", None), set())
        await waiting
        assert loop.time() == (1 if arrives else 2)
        await controller._reviews.await_config({"spec": {"model": 5}})

    virtual_time(main)


class Lead:
    """Stands in for the election."""

    def __init__(self, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.epoch: int | None = None
        monkeypatch.setattr(controller._process, "epoch", lambda: self.epoch)


def test_new_leader_lists_before_it_reconciles(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kube: Any = Kube()
        settings = Settings(lease=LeaseSettings("ns", "stoker"), backoff_seconds=0.01)
        controller = Controller(settings, kube, Catalogue.load())
        controller._loop = asyncio.get_running_loop()
        woken: list[Key] = []
        monkeypatch.setattr(controller._tasks, "wake", woken.append)
        lead = Lead(controller, monkeypatch)
        kube.broken = True
        lead.epoch = 1
        controller._start_leading()
        await until_async(lambda: kube.failures >= 2)
        newer = {**ENDPOINT, "metadata": {**ENDPOINT["metadata"], "resourceVersion": "2"}}
        controller.on_event(KIND, "MODIFIED", newer)
        assert woken == [], "no task runs on a state that may be stale"
        kube.broken = False
        await until_async(lambda: woken)
        assert set(woken) == {Key("ns", "demo")}
        woken.clear()
        lead.epoch = None
        controller._stop_working()
        controller.on_event(
            KIND, "MODIFIED", {**ENDPOINT, "metadata": {**ENDPOINT["metadata"], "resourceVersion": "3"}}
        )
        assert woken == []
        lead.epoch = 2
        controller._start_leading()
        controller._wake(Key("ns", "demo"))
        assert woken == [], "each new leadership lists again"
        await until_async(lambda: woken)

    asyncio.run(main())


def test_reconcile_of_an_earlier_leadership_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        controller = Controller(Settings(lease=LeaseSettings("ns", "stoker")), Kube(), Catalogue.load())  # type: ignore[arg-type]
        lead = Lead(controller, monkeypatch)
        lead.epoch = 1

        def work(cluster: Cluster, *_: Any) -> Outcome:
            with cluster.writer._write():
                pass
            lead.epoch = 2  # another replica may have led in between
            with cluster.writer._write():
                pass
            raise AssertionError("the former leader may write")

        monkeypatch.setattr(reconciler_module, "reconcile", work)
        with pytest.raises(NotLeading):
            await controller._reconcile(Key("ns", "demo"))
        lead.epoch = None
        with pytest.raises(NotLeading):
            await controller._reconcile(Key("ns", "demo"))

    asyncio.run(main())


class BlockedKube(Kube):
    """A cluster that does not answer writes until `may_answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Any] = []
        self.may_answer = threading.Event()

    def apply(self, body: Any, *_: Any, **__: Any) -> Any:
        self.writes.append(body)
        self.may_answer.wait()
        return body


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "not answered"])
def test_lease_is_released_only_after_the_last_write(is_answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kube: Any = BlockedKube()
        controller = Controller(Settings(health_address="127.0.0.1:0"), kube, Catalogue.load())
        ended, released, later_writes = threading.Event(), [], []
        stop = controller._process.stop

        async def record(*, release: bool = True) -> None:
            released.append(release)
            await stop(release=release)

        def work(cluster: Cluster, *_: Any) -> Outcome:
            role: Any = {"kind": "Role", "metadata": {"name": "a", "namespace": "ns", "resourceVersion": "60"}}
            try:
                cluster.writer.apply([role], {})
                later_writes.append("permitted")
                cluster.writer.apply([role], {})
            except NotLeading:
                later_writes.append("refused")
            ended.set()
            return Outcome.SETTLED

        monkeypatch.setattr(controller._process, "stop", record)
        monkeypatch.setattr(reconciler_module, "reconcile", work)
        if not is_answered:
            monkeypatch.setattr(controller_module, "_LAST_WRITES_SECONDS", 0)
        await controller.start()
        await until_async(lambda: kube.writes)
        stopping = asyncio.create_task(controller.stop())
        if is_answered:
            await until_async(lambda: not controller._tasks)
            for _ in range(100):
                await asyncio.sleep(0)
            assert released == [], "a successor would write at the same time"
            kube.may_answer.set()
        await stopping
        assert released == [is_answered]
        kube.may_answer.set()
        await until_async(ended.is_set)
        assert later_writes == ["permitted", "refused"]
        assert len(kube.writes) == 1

    asyncio.run(main())


def test_kind_that_is_installed_later_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        kube: Any = Kube()
        started: list[Any] = []
        settings = Settings(health_address="127.0.0.1:0", resync_seconds=0.02)
        controller = Controller(settings, kube, Catalogue.load(), watch=lambda *watch: started.append(watch))
        monkeypatch.setattr(controller._tasks, "wake", lambda key: None)
        assert "PodMonitor" not in {each.kind for each in controller.watched()}
        await controller.start()
        await kube.listed_again()
        assert not started
        kube.pod_monitors = True
        await until_async(lambda: started)
        await kube.listed_again()
        ((watched, on_event, ended),) = started
        assert [each.kind for each in watched] == ["PodMonitor"]
        events: list[Any] = []
        monkeypatch.setattr(controller, "on_event", lambda *words: events.append(words))
        await asyncio.to_thread(on_event, "PodMonitor", "ADDED", {})
        await until_async(lambda: events == [("PodMonitor", "ADDED", {})])
        await asyncio.to_thread(ended)
        await until_async(lambda: len(started) == 2)
        await controller.stop()

    asyncio.run(main())


def test_watch_that_contradicts_a_list_triggers_a_relist(virtual_time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        controller = Controller(Settings(), Kube(), Catalogue.load())  # type: ignore[arg-type]
        rounds: list[float] = []

        async def relist() -> bool:
            rounds.append(asyncio.get_running_loop().time())
            return True

        monkeypatch.setattr(controller._relisting, "list", relist)
        newer = {**ENDPOINT, "metadata": {**ENDPOINT["metadata"], "resourceVersion": "40"}}
        controller._store.replace(KIND, "", [newer], "50")
        listing = asyncio.create_task(controller._relisting.run())
        await elapse(100)
        controller.on_event(KIND, "MODIFIED", ENDPOINT)  # it may arrive late
        await elapse(100)
        assert rounds == [30], "the first list finds objects deleted before the watches began"
        for _ in range(5):
            controller.on_event(KIND, None, ENDPOINT)
        await elapse(550)
        assert rounds == [30, 200], "further events wait for the regular resync"
        controller._informer.needs_relist = False
        await elapse(100)
        assert rounds == [30, 200, 800]
        listing.cancel()

    virtual_time(main)


def test_namespace_label_wakes_all_endpoints_with_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        gateway = GatewaySettings("https://models.example.com", "system", "gateway")
        settings = Settings(health_address="127.0.0.1:0", gateway=gateway)
        kube: Any = Kube()
        controller = Controller(settings, kube, Catalogue.load())
        woken: list[Key] = []
        granted: list[Key] = []
        monkeypatch.setattr(controller._tasks, "wake", woken.append)
        monkeypatch.setattr(controller._routes._grants, "wake", granted.append)
        await controller.start()

        def says(version: int, name: str, label: str) -> None:
            woken.clear()
            granted.clear()
            metadata = {"name": name, "resourceVersion": str(version), "labels": {"stoker.dev/gateway": label}}
            controller.on_event("Namespace", "MODIFIED", {"kind": "Namespace", "metadata": metadata})

        def route(namespace: str) -> str:
            found = controller._context(Key(namespace, "demo")).route
            return found.reason if found else ""

        spec = {"model": {"source": "demo://gemma-3-270m"}}
        for version, namespace, created in ((100, "ns", 1), (101, "younger", 2)):
            metadata = {"name": "demo", "namespace": namespace, "resourceVersion": str(version)}
            metadata["creationTimestamp"] = f"2026-01-01T00:00:0{created}Z"
            controller.on_event(KIND, "ADDED", {"kind": KIND, "metadata": metadata, "spec": spec})
        says(102, "younger", "enabled")
        assert route("younger") == "Routed"
        says(103, "ns", "enabled")
        assert set(woken) == {Key("ns", "demo"), Key("younger", "demo")}
        assert set(granted) == {Key("ns", ""), Key("younger", "")}
        assert (route("ns"), route("younger")) == ("Routed", "NameTaken")
        says(104, "ns", "enabled")
        assert granted == [], "an unchanged label grants nothing"
        says(105, "ns", "disabled")
        assert (route("ns"), route("younger")) == ("Disabled", "Routed")
        granted.clear()
        role = {"name": "stoker-gateway", "namespace": "ns", "resourceVersion": "106"}
        controller.on_event("Role", "DELETED", {"kind": "Role", "metadata": role})
        assert granted == [Key("ns", "")]
        await controller.stop()

    asyncio.run(main())

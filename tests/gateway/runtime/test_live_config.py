"""Order of a configuration change: the picker never names a server that Envoy does not know."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, Phase, Scaling
from stoker_gateway.runtime import live_config as module
from stoker_gateway.runtime.live_config import LiveConfig
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

from ...support.waiting import until_async


class SlowReader:
    """Reads Envoy's files when permitted, and reports what it has read, as Envoy does."""

    def __init__(self, settings: EnvoySettings) -> None:
        self._settings = settings
        self._versions: dict[str, str] = {}
        self.servers: dict[str, set[str]] = {}
        self.num_queries = 0

    def read(self) -> None:
        """Read all files."""
        content = json.loads(self._settings.clusters_file.read_text())
        self._versions = {"cluster_manager.cds.version_text": content["version_info"]}
        self.servers = {}
        for name in (each["name"] for each in content["resources"]):
            content = json.loads(self._settings.servers_file(name).read_text())
            self._versions[f"cluster.{name}.version_text"] = content["version_info"]
            hosts = content["resources"][0]["endpoints"][0]["lb_endpoints"]
            addresses = (each["endpoint"]["address"]["socket_address"] for each in hosts)
            self.servers[name] = {f"{each['address']}:{each['port_value']}" for each in addresses}

    async def request(self, _method: str, _path: str) -> str:
        """Respond as Envoy's admin interface."""
        self.num_queries += 1
        return "".join(f'{name}: "{version}"\n' for name, version in self._versions.items())


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LiveConfig, SlowReader]]:
    settings = EnvoySettings("127.0.0.1", 0, folder, 1)
    envoy: Any = SlowReader(settings)
    picker = PickerServer(ModelRegistry(), {})
    serving = LiveConfig(EnvoyFiles(settings), envoy, picker, "x")
    serving.begin(ModelRegistry())
    envoy.read()
    yield serving, envoy
    await picker.stop()


def model_registry(**servers: tuple[int, ...]) -> ModelRegistry:
    made = {name: tuple(f"10.0.0.{each}:80" for each in numbers) for name, numbers in servers.items()}
    return ModelRegistry({name: Endpoint(name, f"cluster-{name}", addresses) for name, addresses in made.items()})


def written(folder: Path) -> dict[Path, int]:
    """Return the modification time of each of Envoy's files."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}


def named(serving: LiveConfig) -> dict[str, set[str]]:
    """Return all servers that the picker may name."""
    found: dict[str, set[str]] = {}
    for name, picker in serving.pickers.items():
        picks = [picker.pick(RoutingRequest(), 1e9) for _ in range(40)]
        found[f"cluster-{name}"] = {server for pick in picks if isinstance(pick, Pick) for server in pick.servers}
    return found


def test_picker_switches_after_envoy_and_removed_servers_stay_for_a_while(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as (serving, envoy):
            before, after = model_registry(a=(1,)), model_registry(a=(2,), b=(3,))
            changing = asyncio.create_task(serving.change(before))
            await asyncio.sleep(0)
            envoy.read()
            await changing
            changing = asyncio.create_task(serving.change(after))
            num_queries = envoy.num_queries
            await until_async(lambda: envoy.num_queries >= num_queries + 3)
            assert named(serving) == {"cluster-a": {"10.0.0.1:80"}}
            envoy.read()
            await changing
            assert named(serving) == {"cluster-a": {"10.0.0.2:80"}, "cluster-b": {"10.0.0.3:80"}}
            envoy.read()
            assert envoy.servers == {"cluster-a": {"10.0.0.1:80", "10.0.0.2:80"}, "cluster-b": {"10.0.0.3:80"}}

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("seed", range(4))
def test_removed_servers_are_forgotten_and_new_ones_never(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ON_THE_WAY_S", 0.01)  # removed servers are forgotten in the middle of changes
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.002)
    rng = random.Random(seed)

    async def run() -> None:
        async with served(tmp_path) as (serving, envoy):
            for _ in range(20):
                target = model_registry(
                    **{name: tuple(rng.sample(range(1, 9), 3)) for name in "abc" if rng.random() < 0.7}
                )
                changing = asyncio.create_task(serving.change(target))
                while not changing.done():
                    num_queries = envoy.num_queries + rng.choice([0, 1, 4])
                    await until_async(
                        lambda num_queries=num_queries, changing=changing: (
                            changing.done() or envoy.num_queries >= num_queries
                        )
                    )
                    await asyncio.sleep(0)
                    envoy.read()
                    for cluster, servers in named(serving).items():
                        assert servers <= envoy.servers[cluster]
                await changing

            def only_what_is_wanted() -> bool:
                envoy.read()
                return envoy.servers == {each.cluster: set(each.servers) for each in target.endpoints.values()}

            await until_async(only_what_is_wanted)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_phase_change_writes_no_file_and_forgets_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as (serving, envoy):
            scaling = Scaling("one", "a", 10.0)
            (endpoint,) = model_registry(a=(1,)).endpoints.values()

            async def change(scaling: Scaling | None) -> None:
                registry = ModelRegistry({"a": replace(endpoint, scaling=scaling)})
                changing = asyncio.create_task(serving.change(registry))
                await asyncio.sleep(0)
                envoy.read()
                await changing

            await change(scaling)
            picker = serving.pickers["a"]
            assert isinstance(picker.pick(RoutingRequest(), 1e9), Refusal)  # it has not reported yet
            picker.observe("10.0.0.1:80", ServerLoad(), 1e9, 1e9)
            assert isinstance(picker.pick(RoutingRequest(), 1e9), Pick)
            files = written(tmp_path)
            for phase, drain in ((Phase.DRAINING, "w"), (Phase.ZERO, "w"), (Phase.ACTIVE, "")):
                await change(replace(scaling, phase=phase, drain=drain))
                assert serving.pickers["a"] is picker and picker.sequences == 1
            assert written(tmp_path) == files

    asyncio.run(asyncio.wait_for(run(), 120))

"""Pods listen on all IPv4 and IPv6 addresses; a spec may select one family, but no single address."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused
from stoker_operator.manifests.children import children
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.runtimes.registry import RUNTIMES

DEMO, HUB = {"source": "demo://gemma-3-270m"}, {"source": "hf://org/model"}


def words(document: Any, catalogue: Catalogue, runtime: str, args: list[str], host: str | None = None) -> list[str]:
    model = DEMO if runtime == "stoker" else HUB
    spec = parse(document(model=model, engine={"runtime": runtime, "args": args, "image": "mine:1"})).spec
    return list(RUNTIMES[runtime].invocation(spec, plan(spec, catalogue), host=host).words)


def hosts(words: list[str]) -> list[str]:
    joined = " ".join(words).replace("--host ", "--host=").split()
    return [word.removeprefix("--host=") for word in joined if word.startswith("--host=")]


@pytest.mark.parametrize(("runtime", "expected"), [("stoker", []), ("vllm", ["::"])])
def test_pods_listen_on_all_addresses(document: Any, catalogue: Catalogue, runtime: str, expected: list[str]) -> None:
    assert hosts(words(document, catalogue, runtime, [])) == expected  # Stoker's default is the same


@pytest.mark.parametrize("args", [["--host=0.0.0.0"], ["--host", "0.0.0.0"]])
@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
def test_a_spec_may_choose_ipv4(document: Any, catalogue: Catalogue, runtime: str, args: list[str]) -> None:
    assert set(hosts(words(document, catalogue, runtime, args))) == {"0.0.0.0"}
    assert hosts(words(document, catalogue, runtime, args, "127.0.0.1"))[-1] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.1"])
@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
def test_single_listening_address_is_refused(document: Any, catalogue: Catalogue, runtime: str, host: str) -> None:
    with pytest.raises(Refused, match=f"--host {host} may be unreachable from outside the pod; use :: or 0.0.0.0"):
        words(document, catalogue, runtime, [f"--host={host}"])


def test_services_have_addresses_of_both_families(document: Any, catalogue: Catalogue) -> None:
    spec = parse(document()).spec
    objects = children(Owner("a"), spec, plan(spec, catalogue))
    assert [each["spec"]["ipFamilyPolicy"] for each in objects if each["kind"] == "Service"] == ["PreferDualStack"]

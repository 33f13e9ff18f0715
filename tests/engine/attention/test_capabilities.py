"""A backend's capabilities are data, and agree with its methods."""

from __future__ import annotations

import pytest

from stoker_engine.attention.backend import (
    AttentionBackend,
    BackendCapabilities,
    FusedKVBackend,
    GraphBackend,
    LayerBackend,
    captures_steps,
    fuses_kv,
    runs_layers,
)
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.names import ATTENTION_BACKENDS
from stoker_engine.sizing.graph_memory import are_captured


def backends() -> dict[str, type[AttentionBackend]]:
    pytest.importorskip("triton")
    from stoker_engine.attention.fa3 import FA3Backend
    from stoker_engine.attention.flash_attn import FlashAttnBackend
    from stoker_engine.attention.flashinfer import FlashInferBackend
    from stoker_engine.attention.triton import TritonBackend

    return {
        "native": CpuBackend,
        "sdpa": SdpaBackend,
        "triton": TritonBackend,
        "flash-attn": FlashAttnBackend,
        "flashinfer": FlashInferBackend,
        "fa3": FA3Backend,
    }


def methods(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")}


@pytest.mark.parametrize("name", ["native", "sdpa", "triton", "flash-attn", "flashinfer", "fa3"])
def test_capabilities_agree_with_methods(name: str) -> None:
    backend = backends()[name]
    capabilities = backend.capabilities
    assert isinstance(capabilities, BackendCapabilities)
    for has, protocol in (
        (capabilities.runs_layers, LayerBackend),
        (capabilities.captures_steps, GraphBackend),
        (capabilities.fuses_kv, FusedKVBackend),
    ):
        assert methods(protocol)
        present = {method for method in methods(protocol) if hasattr(backend, method)}
        assert present == (methods(protocol) if has else set()), protocol
    assert all(hasattr(backend, method) for method in methods(AttentionBackend))


def test_graphs_are_planned_for_the_backends_that_capture_steps() -> None:
    for name, backend in backends().items():
        assert are_captured(False, name) == backend.capabilities.captures_steps
    assert are_captured(False, "auto")
    assert not any(are_captured(True, name) for name in ATTENTION_BACKENDS)
    assert {*backends(), "auto"} == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize("is_so", [runs_layers, captures_steps, fuses_kv])
@pytest.mark.parametrize("value", [False, True])
def test_backend_of_another_package_declares_its_capabilities(is_so: object, value: bool) -> None:
    class Other(SdpaBackend):
        capabilities = BackendCapabilities(**{is_so.__name__: value})  # type: ignore[attr-defined]

    assert is_so(Other()) is value  # type: ignore[operator]

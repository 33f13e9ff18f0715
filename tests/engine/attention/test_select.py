"""Which backend computes attention, and what is said where it cannot."""

from __future__ import annotations

import pytest
import torch

from stoker_engine.attention.native import NativeBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ArgumentError

CPU = torch.device("cpu")


def test_by_its_name_or_the_fastest() -> None:
    assert isinstance(attention_backend(CPU, torch.float32), NativeBackend)
    assert isinstance(attention_backend(CPU, torch.float16), SdpaBackend)
    assert isinstance(attention_backend(CPU, torch.float32, name="native"), NativeBackend)
    assert isinstance(attention_backend(CPU, torch.float32, name="sdpa"), SdpaBackend)


@pytest.mark.parametrize(
    ("dtype", "name", "said"),
    [
        (torch.float16, "native", "float16 on cpu; choose auto, or sdpa"),
        (torch.float32, "triton", "need a GPU, and this is a CPU; choose auto, or sdpa"),
    ],
)
def test_what_cannot_run_here_is_refused(dtype: torch.dtype, name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"--attention-backend: .*{said}"):
        attention_backend(CPU, dtype, name=name)  # type: ignore[arg-type]


def test_what_nobody_knows_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--attention-backend"):
        EngineArgs("model", attention_backend="flashinfer")  # type: ignore[arg-type]


def test_batch_invariance_is_refused_where_torch_computes() -> None:
    with pytest.raises(ArgumentError, match=r"--batch-invariant.*Triton's kernels.*--attention-backend sdpa"):
        attention_backend(CPU, torch.float32, batch_invariant=True, name="sdpa")

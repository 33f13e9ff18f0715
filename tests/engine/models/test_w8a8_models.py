"""Models whose activations are quantized, by the reference of the operations (`REFERENCE_W8A8`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import FP8_ROWS
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.bundle import Kernels, Operation, QuantizedRows, RowFormat
from stoker_engine.kernels.moe import make_experts
from stoker_engine.kernels.reference import REFERENCE, REFERENCE_W8A8
from stoker_engine.kernels.w8a8_linear import quantize_rows
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.linear_site import LinearSite
from stoker_engine.models import decoder_loader
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.communicator import Communicator
from stoker_engine.quant.blocks import BlockMatrix
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.weight_formats import WeightFormats

from ...support.engine.served import served
from ...support.engine.tiny_configs import GGUF
from ...support.engine.tiny_models import random_model
from ..quant.quantized_pairs import make_pair
from .conftest import PagedRun
from .test_tensor_parallel import on_every_rank, part_of

CPU: Final = torch.device("cpu")
BF16: Final = torch.bfloat16
VOCABULARY: Final = 320
PROMPTS: Final = [[5, 100, 2, 77], list(range(2, 63))]
#: Biases, layer norms, a parallel residual stream, an ungated MLP, shared experts, latent attention.
FAMILIES: Final = ("llama", "llama biases", "phi3", "gpt_neox", "qwen2_moe", "deepseek_v3")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def formats(config: ModelConfig, method: str, on_cpu: bool) -> WeightFormats:
        return on_load_formats(config, method, on_cpu=False)

    monkeypatch.setattr(decoder_loader, "on_load_formats", formats)


def save(name: str, folder: Path) -> None:
    kind, options = GGUF[name]
    wide = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "v_head_dim": 16,
        "shared_expert_intermediate_size": 32, "q_lora_rank": 32,
    }  # fmt: skip
    options = {**options, **{key: value for key, value in wide.items() if key in options}}
    random_model(kind, options).save_pretrained(folder)


def load(folder: Path, kernels: Kernels, quantization: str | None = "fp8", **build: object) -> Decoder:
    backend = attention_backend(CPU, served(BF16), False, "sdpa")
    checkpoint = find_checkpoint(EngineArgs(model=str(folder), quantization=quantization))
    model = checkpoint.load(replace(Build(BF16, backend, kernels), **build), CPU, 128)  # type: ignore[arg-type]
    assert isinstance(model, Decoder)
    return model


def matrices_of(model: Decoder) -> list[BlockMatrix]:
    return [each for each in model.modules() if isinstance(each, BlockMatrix)]


def logits(model: Decoder) -> torch.Tensor:
    run = PagedRun(model, PROMPTS, new_tokens=1, dtype=BF16, chunks=(64,), compares_subsets=False)
    return torch.cat(
        [torch.stack(each.logits[: len(prompt)]) for each, prompt in zip(run.sequences, PROMPTS, strict=True)]
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_results_do_not_depend_on_where_rows_are_quantized(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and activations that quantize their results give the bits of separate operations, which are close to
    products with unquantized activations."""
    save(name, tmp_path)
    early, separate = load(tmp_path, REFERENCE_W8A8), load(tmp_path, replace(REFERENCE_W8A8, quantizing={}))
    quantized = 0

    def forward(linear: MergedLinear, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        nonlocal quantized
        quantized += isinstance(x, QuantizedRows)
        return linear._linear(x)

    monkeypatch.setattr(MergedLinear, "__call__", forward)
    found = logits(early)
    assert quantized >= len(early.layers)
    quantized = 0
    assert torch.equal(logits(separate), found)
    assert not quantized
    weight_only = logits(load(tmp_path, REFERENCE))
    # Random models with rows of 64 enlarge errors; unrelated logits would differ by a factor above 1.
    assert (found - weight_only).norm() <= 0.5 * weight_only.norm()
    assert not torch.equal(found, weight_only)


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_all_matrices_are_packed(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    matrices = matrices_of(load(tmp_path, REFERENCE_W8A8))
    assert any(each.blocks.dim() == 3 for each in matrices) == (name == "qwen2_moe")
    assert all(each.is_packed and each.stored == FP8_ROWS for each in matrices)


def test_why_matrices_are_weight_only_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random_model("llama", {"hidden_size": 64, "intermediate_size": 72}).save_pretrained(tmp_path)
    with caplog.at_level("INFO", "stoker_engine.models.decoder_loader"):
        matrices = matrices_of(load(tmp_path, REFERENCE_W8A8))
    num_packed = sum(each.is_packed for each in matrices)
    assert 0 < num_packed < len(matrices)
    logged = [record.getMessage() for record in caplog.records if "activations" in record.getMessage()]
    assert logged == [
        f"{num_packed} of {len(matrices)} FP8 matrices are multiplied with activations quantized to FP8; "
        "--fp8-weight-only disables this",
        f"the activations of {len(matrices) - num_packed} are not quantized: 64 rows of 72 columns, of which one is no "
        "multiple of 16",
    ]


def fake_quantized(formats: dict[int, RowFormat]) -> Kernels:
    """Return kernels that quantize and dequantize the activations of matrices by their number of columns, and then
    multiply unquantized values: the definition of quantized activations."""

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        multiply, inner = REFERENCE.linear(weight, bias), weight.shape[1]
        if inner not in formats or len(weight) == VOCABULARY:
            return multiply
        format = formats[inner]

        def quantized(x: torch.Tensor) -> torch.Tensor:
            values, scales = quantize_rows(x, format)
            rows = values.float() * scales.repeat_interleave(format.group or inner, dim=1)[:, :inner]
            return multiply(rows.view(x.shape).to(x.dtype))

        return quantized

    return replace(REFERENCE, linear=linear, experts=make_experts(linear, REFERENCE.act_and_mul))


@pytest.mark.parametrize(
    ("family", "method", "formats"),
    [
        ("llama", "FP8 blocks of 128", {192: RowFormat.FP8_GROUPS, 256: RowFormat.FP8_GROUPS, 64: RowFormat.FP8_ROWS}),
        (
            "mixtral",
            "FP8 blocks of 128",
            {192: RowFormat.FP8_GROUPS, 256: RowFormat.FP8_GROUPS, 64: RowFormat.FP8_ROWS},
        ),
        ("llama", "W8A8", dict.fromkeys((192, 256, 64), RowFormat.INT8_ROWS)),
        ("mixtral", "FP8 tensors", dict.fromkeys((192, 256, 64), RowFormat.FP8_ROWS)),
    ],
)
def test_checkpoints_are_multiplied_as_they_state(
    family: str, method: str, formats: dict[int, RowFormat], tmp_path: Path, tiny_llama: Path
) -> None:
    """Logits are close to those of dequantized weights with activations that are quantized and dequantized. Their
    distance is smaller than the effect of quantized activations."""
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "initializer_range": 0.05}
    sizes |= {"num_local_experts": 4} if family == "mixtral" else {}
    random_model(family, sizes).save_pretrained(tmp_path / "source")
    pair = make_pair(family, method, tmp_path, tmp_path / "source", tiny_llama)
    model = load(pair.quantized, REFERENCE_W8A8, None)
    for matrix in matrices_of(model):
        assert matrix.row_format == formats[matrix.inner]
    found = logits(model)
    defined = logits(load(pair.dequantized, fake_quantized(formats), None))
    exact = logits(load(pair.dequantized, REFERENCE, None))
    effect = (found - exact).norm()
    # Everything else is rounded to bfloat16, whose error is not much smaller than that of int8.
    assert (found - defined).norm() <= (0.75 if method == "W8A8" else 0.5) * effect
    assert effect <= (0.1 if method == "W8A8" else 0.4) * exact.norm()
    weight_only = logits(load(pair.quantized, REFERENCE, None))
    assert (weight_only - exact).norm() <= 0.02 * exact.norm()


def test_adapters_get_unquantized_activations(tmp_path: Path) -> None:
    save("llama", tmp_path)
    seen: list[type] = []

    def extend(linear: Callable[[torch.Tensor], torch.Tensor], site: LinearSite, rows: object) -> object:
        if not any(name.startswith("layers.") for name in site.outputs):
            return linear

        def extended(x: torch.Tensor) -> torch.Tensor:
            seen.append(type(x))
            return linear(x)

        return extended

    found = logits(load(tmp_path, REFERENCE_W8A8, extend=extend))
    assert set(seen) == {torch.Tensor}
    assert torch.equal(found, logits(load(tmp_path, REFERENCE_W8A8)))


def test_ranks_add_up_products_with_their_own_scales(tmp_path: Path) -> None:
    """Each rank has a scale for its part of a row, of weights and of activations, so sums are close, not equal."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    random_model("llama", sizes).save_pretrained(tmp_path)

    def work(ranks: Communicator) -> torch.Tensor:
        model = load(tmp_path, REFERENCE_W8A8, ranks=ranks)
        matrices = matrices_of(model)
        assert len(matrices) == 2 * 4 and all(each.is_packed for each in matrices)
        return logits(part_of(model, ranks))

    first, second = on_every_rank(2, work)
    whole, exact = (logits(load(tmp_path, REFERENCE_W8A8, each)) for each in ("fp8", None))
    assert torch.equal(first, second)
    assert (first - exact).norm() <= 1.2 * (whole - exact).norm()

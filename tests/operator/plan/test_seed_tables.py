"""The contract for parallelism: all rows of the tables of vLLM sizes that users know.

Manifests with a wrong tensor × data are refused by the API's own rule before planning; its message is checked here too,
since it comes from the same table.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.options import recommended
from stoker_operator.plan.planner import Study, Unplannable, plan, planned_ways_out

from .conftest import LLAMA_8B, LLAMA_70B, LLAMA_405B, MISTRAL_7B, document

Studied = Callable[..., Study]


# Defaults


@pytest.mark.parametrize(
    ("accelerator", "count"), [("nvidia-a10g", 4), ("nvidia-h100-80gb", 8), ("nvidia-a100-80gb", 1)]
)
def test_one_engine_uses_all_gpus_by_default(spec: Callable[..., Spec], accelerator: str, count: int) -> None:
    placement = plan(spec(LLAMA_8B, accelerator, count), Catalogue.load()).placement
    assert placement.sizes == (count, 1, 1)


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ({"tensor": 2}, (2, 1, 2)),
        ({"data": 4}, (1, 1, 4)),
        ({"data": 2}, (2, 1, 2)),
        ({"tensor": 2, "data": 2}, (2, 1, 2)),
        ({"pipeline": 2}, (2, 2, 1)),
    ],
)
def test_missing_sizes_use_the_remaining_gpus(
    spec: Callable[..., Spec], parallelism: dict[str, int], expected: tuple[int, ...]
) -> None:
    planned = plan(spec(LLAMA_8B, "nvidia-a100-80gb", 4, parallelism=parallelism), Catalogue.load())
    assert planned.placement.sizes == expected


# How many GPUs a model needs


@pytest.mark.parametrize(
    ("source", "tensor", "gigabytes"),
    # Two GPUs hold the weights of 70B and a single sequence of 8,192 tokens: too little to serve.
    [(LLAMA_8B, 1, 16), (LLAMA_70B, 4, 140)],
)
def test_recommendation_uses_the_fewest_80_gb_gpus(
    studied: Studied, source: str, tensor: int, gigabytes: float
) -> None:
    found = studied(source, "nvidia-h100-80gb", 8)
    best = recommended(found.options)
    assert best is not None
    assert (best.sizes.tensor, best.sizes.pipeline) == (tensor, 1)
    assert best.estimate is not None
    assert best.estimate.weight_bytes_per_gpu * tensor / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_405b_in_16_bits_does_not_fit_8_gpus_of_80_gb(spec: Callable[..., Spec]) -> None:
    """The table claims that it fits: 810 GB in 8 × 80 GB."""
    with pytest.raises(Unplannable) as refused:
        plan(spec(LLAMA_405B, "nvidia-h100-80gb", 8), Catalogue.load())
    (violation,) = refused.value.violations
    assert violation.reason == "DoesNotFit"
    assert violation.message.startswith("weights 94.5 GiB + activations")
    assert "use at least 16 × nvidia-h100-80gb with tensor 8 × pipeline 2" in violation.remedy
    assert "set spec.engine.quantization to fp8, which fits with tensor 8, data 1" in violation.remedy


def test_remedies_for_405b_fit(studied: Studied) -> None:
    assert not studied(LLAMA_405B, "nvidia-h100-80gb", 8, quantization="fp8").unplannable
    sizes = {"tensor": 8, "pipeline": 2}
    assert not studied(LLAMA_405B, "nvidia-h100-80gb", 16, parallelism=sizes).unplannable


# Llama 3 8B on 4 × A100 80 GB: the default, the balanced and the most engines


@pytest.mark.parametrize(
    ("parallelism", "sizes", "engines"), [(None, (4, 1), 1), ({"tensor": 2}, (2, 2), 2), ({"tensor": 1}, (1, 4), 4)]
)
def test_every_layout_of_four_gpus_can_be_requested(
    spec: Callable[..., Spec], parallelism: dict[str, int] | None, sizes: tuple[int, int], engines: int
) -> None:
    planned = plan(spec(LLAMA_8B, "nvidia-a100-80gb", 4, parallelism=parallelism), Catalogue.load())
    assert (planned.placement.tensor, planned.placement.data) == sizes
    assert planned.placement.data == engines
    assert planned.max_model_len == 8192


def test_more_engines_leave_each_less_memory_for_its_cache(studied: Studied) -> None:
    found = studied(LLAMA_8B, "nvidia-a100-80gb", 4)
    assert [way.sizes for way in found.options] == [(4, 1, 1), (2, 1, 2), (1, 1, 4)]
    tokens, weights, concurrency = zip(
        *(
            (way.estimate.kv_tokens_per_copy, way.estimate.weight_bytes_per_gpu, way.estimate.max_concurrency)
            for way in found.options
            if way.estimate
        ),
        strict=True,
    )
    # 32 layers × 2 × 8 KV heads × 128 elements × 2 bytes are 128 KiB per token, of 75 GiB per GPU less weights. The
    # null block holds no sequence's tokens.
    assert tokens == (2_191_456 - 16, 1_033_600 - 16, 458_768 - 16)
    assert [round(size / 1e9, 1) for size in weights] == [4.0, 8.0, 16.1]
    assert concurrency == tuple(count // 8192 for count in tokens)
    best = recommended(found.options)
    assert best is not None and best.sizes == (1, 1, 4)


# Choosing the right configuration


def test_70b_on_8_gpus_is_two_engines_of_four(studied: Studied) -> None:
    """Four engines of two GPUs would fit, with room for one sequence each."""
    best = recommended(studied(LLAMA_70B, "nvidia-h100-80gb", 8).options)
    assert best is not None and best.sizes == (4, 1, 2)


# Common mistakes


@pytest.mark.parametrize(
    ("parallelism", "message", "remedies"),
    [
        (
            {"tensor": 1, "data": 1},
            "tensor (1) × data (1) uses 1 of 4 GPUs, 3 would be idle",
            ["tensor 1, data 4"],
        ),
        (
            {"tensor": 2, "data": 4},
            "tensor (2) × data (4) needs 8 GPUs, 4 available",
            ["tensor 2, data 2", "tensor 1, data 4"],
        ),
        (
            {"tensor": 3, "data": 1},
            "tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle",
            ["tensor 4, data 1", "tensor 2, data 2"],
        ),
    ],
)
def test_uneven_sizes_are_refused_with_even_ones(
    parallelism: dict[str, int], message: str, remedies: list[str]
) -> None:
    manifest = document(MISTRAL_7B, "nvidia-a10g", 4, parallelism=parallelism)
    with pytest.raises(Refused) as refused:
        parse(manifest)
    (violation,) = planned_ways_out(manifest, refused.value.violations, Catalogue.load(), lambda _: None)
    assert violation.field == "spec.parallelism"
    assert violation.message == message
    for remedy in remedies:
        assert remedy in violation.remedy


def test_70b_on_a_single_gpu_is_refused(spec: Callable[..., Spec]) -> None:
    with pytest.raises(Unplannable) as refused:
        plan(spec(LLAMA_70B, "nvidia-h100-80gb", 1), Catalogue.load())
    (violation,) = refused.value.violations
    assert violation.field == "spec.hardware"
    assert "exceed 73.3 GiB, 92% of an accelerator's memory" in violation.message
    assert violation.remedy == "use at least 2 × nvidia-h100-80gb with tensor 2"


@pytest.mark.parametrize("sizes", [{"tensor": 1, "data": 4}, {"tensor": 2, "data": 2}, {"tensor": 4}])
def test_remedies_for_uneven_sizes_are_accepted(spec: Callable[..., Spec], sizes: dict[str, int]) -> None:
    assert plan(spec(MISTRAL_7B, "nvidia-a10g", 4, parallelism=sizes), Catalogue.load()).placement.idle == 0


def test_idle_gpus_are_permitted_with_allow_idle(spec: Callable[..., Spec]) -> None:
    tested_spec = spec(MISTRAL_7B, "nvidia-a10g", 4, hardware={"allowIdle": True}, parallelism={"tensor": 3, "data": 1})
    with pytest.raises(Unplannable, match="tensor 3 does not divide the model's 32 attention heads"):
        plan(tested_spec, Catalogue.load())
    tested_spec = spec(MISTRAL_7B, "nvidia-a10g", 4, hardware={"allowIdle": True}, parallelism={"tensor": 2, "data": 1})
    placement = plan(tested_spec, Catalogue.load()).placement
    assert (placement.sizes, placement.idle) == ((2, 1, 1), 2)

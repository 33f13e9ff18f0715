"""Remedies of refused specs are accepted: for random models, machines and settings, every remedy that can be parsed is
tried.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.planner import Study, plan, planned_ways_out, study
from stoker_operator.reconcile.evaluate import Configs, PlanningContext, evaluate

from .conftest import document

#: A catalogue in which both runtimes have an image for all accelerators, so that each can be the other's remedy.
CATALOGUE: Final = Catalogue.load().model_copy(
    update={
        "runtimes": {name: dict.fromkeys(("cuda", "rocm", "cpu", "tpu"), f"{name}:1") for name in ("stoker", "vllm")}
    }
)
MODELS: Final = (
    "meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-405B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen3-8B-FP8",
    "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-V3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1", "openai/gpt-oss-20b", "openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2",
    "openai-community/gpt2", "org/unknown", "org/exaone",
)  # fmt: skip
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "org/exaone": {
        **{name: value for name, value in table()["Qwen/Qwen3-8B"].items() if name != "quantization_config"},
        "architectures": ["Exaone4ForCausalLM"],
    },
}
QUANTIZED: Final[tuple[dict[str, Any] | None, ...]] = (
    None,
    None,
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "torchao"},
    {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
)
ACCELERATORS: Final = (
    ("cpu", 1), ("nvidia-t4", 4), ("nvidia-l4", 8), ("nvidia-a100-80gb", 8), ("nvidia-h100-80gb", 8), ("amd-mi300x", 8)
)  # fmt: skip
SIZES: Final = (
    r"tensor (?P<tensor>\d+)(?:(?: ×|,) pipeline (?P<pipeline>\d+))?"
    r"(?:, data (?P<data>\d+))?(?:, expert (?P<expert>\d+))?"
)


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a random manifest, and its model's config.json if it has one."""
    draw = random.Random(seed)
    name = draw.choice(MODELS)
    config = CONFIGS.get(name)
    stated = draw.choice(QUANTIZED)
    if stated and (known := config or table().get(name)) and not known.get("quantization_config"):
        config = {**known, "quantization_config": stated}
    accelerator, max_count = draw.choice(ACCELERATORS)
    count = draw.choice([size for size in (1, 2, 3, 4, 8) if size <= max_count])
    sizes: dict[str, int] = {}
    ranks = draw.choice([1, 2, 4]) if accelerator == "cpu" else count
    if draw.random() < 0.6:
        tensor = draw.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        pipeline = draw.choice([1, 1, 1, ranks // tensor])
        sizes = {"tensor": tensor, "pipeline": pipeline, "data": ranks // tensor // pipeline}
        if draw.random() < 0.6:
            sizes["expert"] = draw.choice([1, 2, tensor, tensor * sizes["data"]])
    engine: dict[str, Any] = {"runtime": draw.choice(["stoker", "vllm"])}
    for field, values in {
        "dtype": ["float32", "float16", "bfloat16"],
        "kvCacheDtype": ["fp8", "fp8_e5m2", "int8_per_token_head"],
        "quantization": ["fp8", "awq", "bitsandbytes", "int8", "gptq_marlin"],
        "maxModelLen": [512, 8192, 131072, 400_000],
    }.items():
        if draw.random() < 0.25:
            engine[field] = draw.choice(values)
    limits = {"resources": {"limits": {"memory": draw.choice(["2Gi", "24Gi", "120Gi"])}}}
    hardware = limits if accelerator == "cpu" else {"count": count}
    return document(f"hf://{name}", accelerator, hardware=hardware, parallelism=sizes or None, **engine), config


def merged(manifest: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a manifest with one field of its spec changed; None removes it."""
    made = copy.deepcopy(manifest)
    *path, last = field.removeprefix("spec.").split(".")
    inside = made["spec"]
    for step in path:
        inside = inside.setdefault(step, {})
    inside.pop(last, None)
    if value is not None:
        inside[last] = value
    return made


def shared(manifest: dict[str, Any], sizes: dict[str, str | None], count: int | None = None) -> dict[str, Any]:
    made = merged(manifest, "parallelism", {name: int(size) for name, size in sizes.items() if size})
    return made if count is None else merged(made, "hardware.count", count)


def tried(manifest: dict[str, Any], violation: Violation) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each remedy of a violation, with the changed manifest."""
    text, field = violation.remedy, violation.field
    for found in re.finditer(rf"(?:use |or |with ){SIZES}(?: \(recommended(?P<better>[^)]*)\))?", text):
        before = text[: found.start("tensor")]
        if before.endswith(("which fits with tensor ", "data 1 with tensor ")) or "runtime: " in before:
            continue  # the remedy names more than sizes
        if count := re.search(r"use hardware\.count (\d+) with tensor $", before):
            yield "smaller pods", shared(manifest, sizes_of(found), int(count[1]))
        elif count := re.search(r"use at least (\d+) × \S+ with tensor $", before):
            yield "larger machines", shared(manifest, sizes_of(found), int(count[1]))
        else:
            yield "sizes", shared(manifest, sizes_of(found))
            if better := re.search(r"hardware\.count (\d+), replicas (\d+)", found["better"] or ""):
                apart = {name: None if name == "data" else size for name, size in sizes_of(found).items()}
                yield "pods of one engine", merged(shared(manifest, apart, int(better[1])), "replicas", int(better[2]))
    if "with runtime: " not in text and (
        found := re.search(rf"quantization to fp8(?: with spec\.engine\.runtime (\w+))?, which fits with {SIZES}", text)
    ):
        made = merged(shared(manifest, sizes_of(found)), "engine.quantization", "fp8")
        yield "fp8", merged(made, "engine.runtime", found[1]) if found[1] else made
    if found := re.search(r"use (?:hardware\.count (\d+), )?data 1 with expert (\d+)", text):
        stated = manifest["spec"]["parallelism"]
        alone = {**stated, "tensor": found[2], "data": 1, "expert": found[2]}
        yield "one engine", shared(manifest, alone, int(found[1]) if found[1] else None)
    if found := re.search(r"(?:lower it to|use at most) (\d+)", text):
        yield "a length", merged(manifest, "engine.maxModelLen", int(found[1]))
    if "with runtime: " not in text and (found := re.search(r"limits\.memory to (\d+Gi)", text)):
        yield "memory", merged(manifest, "hardware.resources.limits.memory", found[1])
    if found := re.search(r"maxNumBatchedTokens to (\d+) and maxNumSeqs to (\d+)", text):
        made = merged(manifest, "engine.maxNumBatchedTokens", int(found[1]))
        yield "shorter steps", merged(made, "engine.maxNumSeqs", int(found[2]))
    if "set spec.engine.dtype to bfloat16" in text:
        yield "bfloat16", merged(manifest, "engine.dtype", "bfloat16")
    if violation.reason == "ExpertMismatch" and (found := re.match(r"use (\d+)", text)):
        yield "experts", merged(manifest, field, int(found[1]))
    if re.search(r"(?:^|, or |; or )remove it", text):
        yield "without", merged(manifest, field, None)
    if found := re.search(r"(?:^|, or )use runtime: (\w+)$", text):
        yield "a runtime", merged(manifest, "engine.runtime", found[1])
    if field.startswith("spec.engine.") and (found := re.match(r"use ([a-z]\w*(?: or [a-z]\w*)*)(?:$|, or )", text)):
        for value in found[1].split(" or "):
            yield "a value", merged(manifest, field, value)
    if found := re.search(r"quantizes on load, ([\w ]+)$", text):
        for value in found[1].split(" or "):
            yield "on load", merged(manifest, field, value)


def sizes_of(found: re.Match[str]) -> dict[str, str | None]:
    return {name: found[name] for name in ("tensor", "pipeline", "data", "expert")}


def refusals(manifest: dict[str, Any], config: dict[str, Any] | None) -> tuple[Violation, ...]:
    found: Study = study(parse(manifest).spec, CATALOGUE, config)
    return (*found.refused, *found.unplannable)


def named(seed: int) -> set[str]:
    """Try the remedies for a seed; return their kinds."""
    manifest, config = drawn(seed)
    try:
        against = refusals(manifest, config)
    except Refused:
        return set()  # a rule of the API, not of the planner
    reasons, kinds = {each.reason for each in against}, set()
    for violation in against:
        assert violation.remedy
        known = config or table().get(manifest["spec"]["model"]["source"].removeprefix("hf://"))
        if "use the unquantized model" in violation.remedy and known:
            kinds.add("numbers")
            plain = {name: value for name, value in known.items() if name != "quantization_config"}
            assert {each.reason for each in refusals(manifest, plain)} <= reasons - {violation.reason}, str(violation)
        for kind, change in tried(manifest, violation):
            kinds.add(kind)
            remaining = {each.reason for each in refusals(change, config)}
            assert remaining <= reasons - {violation.reason}, (str(violation), kind, change["spec"], remaining)
    return kinds


@pytest.mark.parametrize("seed", range(60))
def test_remedies_are_accepted(seed: int) -> None:
    named(seed)


def test_shorter_steps_are_a_remedy_where_large_ones_do_not_fit() -> None:
    """Llama 2 70B in 8.5 bits on one GPU: its weights leave 4.6 GiB, of which large steps need 2."""
    hub = "hf://meta-llama/Llama-2-70b-chat-hf"
    manifest = document(hub, "nvidia-h100-80gb", 1, runtime="stoker", quantization="int8")
    (violation,) = refusals(manifest, None)
    (change,) = [change for kind, change in tried(manifest, violation) if kind == "shorter steps"]
    assert not refusals(change, None)
    assert (
        "maxNumSeqs"
        not in refusals(merged(change, "model.source", "hf://meta-llama/Llama-3.1-405B-Instruct"), None)[0].remedy
    )


@pytest.mark.slow
def test_many_remedies_of_every_kind_are_accepted() -> None:
    kinds = set().union(*map(named, range(60, 500)))
    assert kinds >= {
        "sizes", "pods of one engine", "smaller pods", "larger machines", "fp8", "one engine", "a length", "memory",
        "experts", "without", "a runtime", "a value", "on load", "numbers",
    }  # fmt: skip


TOPOLOGY: Final = "cloud.google.com/gke-tpu-topology"


def drawn_uneven(seed: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a manifest whose sizes rarely match its accelerators, on one or several pods, or with a MIG slice."""
    draw = random.Random(seed)
    manifest, config = drawn(seed)
    made = merged(merged(manifest, "hardware.resources", None), "hardware.accelerator", "nvidia-h100-80gb")
    if draw.random() < 0.2:
        made = merged(made, "hardware.accelerator", "google-tpu-v6e")
        made["spec"]["template"] = {"spec": {"nodeSelector": {TOPOLOGY: draw.choice(["1x1", "2x2", "2x4", "4x4"])}}}
    made = merged(made, "hardware.count", draw.choice([1, 2, 3, 4, 6, 8]))
    if draw.random() < 0.2:
        made = merged(made, "hardware.nodes", draw.choice([2, 3]))
    stated = [name for name in ("tensor", "data", "pipeline", "expert") if draw.random() < 0.5]
    sizes = {name: draw.choice([1, 2, 3, 4, 6, 8]) for name in stated}
    return merged(made, "parallelism", sizes or None), config


def planned(manifest: dict[str, Any], config: dict[str, Any] | None) -> tuple[Violation, ...]:
    """Return all violations of a manifest, as admission does."""
    try:
        plan(parse(manifest).spec, CATALOGUE, config)
    except Refused as refused:
        return planned_ways_out(manifest, refused.violations, CATALOGUE, lambda _: config)
    return ()


def of_sizes(violations: tuple[Violation, ...], kind: str) -> list[str]:
    """Return the reasons that other sizes, counts or lengths could fix; sizes alone do not fix those about a slice."""
    reasons = ("MaxModelLenDoesNotFit", "DoesNotFit")
    fields = ("spec.parallelism", "spec.hardware", *(() if kind == "sizes" else ("spec.template",)))
    return [str(each) for each in violations if each.field.startswith(fields) or each.reason in reasons]


def named_by_rules(seed: int) -> set[str]:
    """Try the remedies for sizes that the API's rules refuse; return their kinds."""
    manifest, config = drawn_uneven(seed)
    kinds = set()
    for violation in planned(manifest, config):
        remedy, start = violation.remedy, manifest
        assert remedy
        if violation.reason not in ("Invalid", "NotSupported", "TopologyMismatch") or " must " in remedy:
            kinds.add("words of the rule")
            continue
        if found := re.match(rf"no sizes that use all \d+ are possible; with {SIZES}: [^;]*", remedy):
            kinds.add("none")
            remedy, start = remedy[found.end() :], merged(shared(manifest, sizes_of(found)), "hardware.nodes", None)
            start = merged(start, "hardware.nodes", manifest["spec"]["hardware"].get("nodes"))
        changes = list(tried(start, replace(violation, remedy=remedy)))
        if found := re.search(r"set (?:spec\.)?hardware\.count to (\d+)( and remove spec\.parallelism)?", remedy):
            count = merged(merged(start, "hardware.count", int(found[1])), "hardware.nodes", None)
            changes.append(("a count", merged(count, "parallelism", None) if found[2] else count))
        if "set hardware.allowIdle to true" in remedy:
            changes.append(("idle", merged(start, "hardware.allowIdle", True)))
        if found := re.search(r"select topology (\w+)", remedy):
            selected = copy.deepcopy(start)
            selected["spec"]["template"]["spec"]["nodeSelector"][TOPOLOGY] = found[1]
            changes.append(("a topology", selected))
        one_node = r"set hardware\.nodes to 1(?:, hardware\.count to (\d+))? and"
        if found := re.match(rf"{one_node} use {SIZES}(?P<fp8>, and set)?", remedy):
            count = int(found[1]) if found[1] else None
            alone = merged(shared(start, sizes_of(found), count), "hardware.nodes", None)
            changes = [("one pod", merged(alone, "engine.quantization", "fp8") if found["fp8"] else alone)]
        if found := re.match(rf"{one_node} remove spec\.parallelism", remedy):
            alone = merged(merged(start, "parallelism", None), "hardware.nodes", None)
            changes = [("one pod", merged(alone, "hardware.count", int(found[1])) if found[1] else alone)]
        for kind, change in changes:
            kinds.add(kind)
            remaining = of_sizes(planned(change, config), "sizes" if "none" in kinds else kind)
            unrelated = [
                each for each in remaining if violation.reason == "TopologyMismatch" and "topology" not in each
            ]
            assert remaining == unrelated, (str(violation), kind, change["spec"], remaining)
    return kinds


@pytest.mark.parametrize("seed", range(60))
def test_remedies_of_manifest_rules_are_accepted(seed: int) -> None:
    named_by_rules(seed)


@pytest.mark.slow
def test_many_remedies_of_manifest_rules_are_accepted() -> None:
    kinds = set().union(*map(named_by_rules, range(60, 500)))
    assert kinds >= {
        "sizes", "pods of one engine", "idle", "a count", "one pod", "a topology", "none", "words of the rule",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "sizes", "remedy"),
    [
        (6, {"tensor": 4, "data": 1}, "use tensor 1, data 6 (recommended; better as hardware.count 1, replicas 6) or "
         "tensor 2, data 3, or set hardware.allowIdle to true"),
        (2, {"data": 2, "pipeline": 3}, "use tensor 1, data 2 (recommended; better as hardware.count 1, replicas 2) or "
         "tensor 2, data 1, or set hardware.count to 6"),
    ],
)  # fmt: skip
def test_remedies_name_only_sizes_that_divide_the_model(count: int, sizes: dict[str, int], remedy: str) -> None:
    manifest = document("hf://meta-llama/Meta-Llama-3-8B", "nvidia-h100-80gb", count, parallelism=sizes)
    (violation,) = planned(manifest, None)
    assert violation.remedy == remedy
    (unknown,) = planned(merged(manifest, "model.source", "hf://org/unknown"), None)
    assert "use " not in unknown.remedy and " must " in unknown.remedy


def test_admission_names_sizes_from_the_cached_config() -> None:
    """The webhook uses only cached data: it plans sizes if the model's config.json is available."""
    manifest = document(
        "hf://org/exaone", "nvidia-h100-80gb", 6, parallelism={"tensor": 4, "data": 1}, runtime="stoker"
    )

    def remedy(configs: Configs) -> str:
        (violation,) = evaluate(Owner("demo"), manifest, PlanningContext(CATALOGUE, configs)).violations
        return violation.remedy

    assert remedy(lambda _name, _revision: None).startswith("tensor × data must be 6 (")
    llama = table()["meta-llama/Meta-Llama-3-8B"]
    assert remedy(lambda _name, _revision: llama).startswith("use tensor 1, data 6 (recommended")

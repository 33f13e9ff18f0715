"""For seeded manifests, plan and admission agree, and recommendations pass validation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused
from stoker_operator.cli.plan import main
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.options import Advice
from stoker_operator.plan.planner import study
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

from .conftest import document

CATALOGUE = Catalogue.load()
MODELS = sorted(name for name in table() if "/" in name)
KEYS = CATALOGUE.every_key()
OWNER = Owner("demo", "default", "uid")


def manifest(dice: random.Random) -> dict[str, Any]:
    """Return a typical manifest, sometimes with errors."""
    maybe = dice.random
    source = f"hf://{dice.choice(MODELS)}" if maybe() < 0.9 else "pvc://models/mine"
    engine: dict[str, Any] = {"runtime": dice.choice(["vllm", "vllm", "vllm", "stoker"])}
    if maybe() < 0.3:
        engine["image"] = "mine:1"
    if maybe() < 0.3:
        engine["maxModelLen"] = dice.choice([512, 4096, 32768, 1_000_000])
    if maybe() < 0.2:
        engine["quantization"] = dice.choice(["fp8", "awq", "gptq", "bitsandbytes"])
    if maybe() < 0.2:
        engine["kvCacheDtype"] = dice.choice(["auto", "fp8"])
    if maybe() < 0.2:
        engine["args"] = [dice.choice(["--max-num-seqs=8", "--tensor-parallel-size=2", "--no-such-flag"])]
    parallelism: dict[str, Any] = {}
    for size in ("tensor", "data", "pipeline", "expert"):
        if maybe() < 0.15:
            parallelism[size] = dice.choice([1, 2, 3, 4, 8])
    if maybe() < 0.25:
        parallelism = {"mode": "Auto"}
    if maybe() < 0.25:
        parallelism["minConcurrency"] = dice.choice([1, 8, 64])
    accelerator = dice.choice(KEYS)
    made = document(source, accelerator, dice.choice([1, 2, 4, 5, 8]), parallelism=parallelism or None, **engine)
    if maybe() < 0.1:
        made["spec"]["hardware"]["nodes"] = 2
    if maybe() < 0.2:
        made["spec"]["replicas"] = dice.choice([0, 2])
    if accelerator.startswith("google-tpu") and maybe() < 0.7:
        label = "cloud.google.com/gke-tpu-topology"
        made["spec"]["template"] = {"spec": {"nodeSelector": {label: dice.choice(["1x1", "2x2", "2x4"])}}}
    return made


def judged(document: dict[str, Any]) -> set[str]:
    """Return the reasons that admission and reconcile report."""
    return {str(violation) for violation in evaluate(OWNER, document, PlanningContext(CATALOGUE)).violations}


@pytest.mark.parametrize("seed", range(120))
def test_plan_and_admission_agree(seed: int, tmp_path: Path, capsys: Any) -> None:
    made = manifest(random.Random(seed))
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(made))
    code = main(["-f", str(file), "-o", "json"])
    found = json.loads(capsys.readouterr().out)
    messages = {f"{each['field']}: {each['message']}; {each['remedy']}".removesuffix("; ") for each in found["errors"]}
    assert messages == judged(made)
    assert (code, found["accepted"]) == ((2, False) if messages else (0, True))


@pytest.mark.parametrize("seed", range(300))
def test_recommendations_pass_admission(seed: int) -> None:
    made = manifest(random.Random(seed))
    made["spec"]["hardware"].pop("nodes", None)
    made["spec"]["engine"] |= {"image": "mine:1"}
    made["spec"]["engine"].pop("args", None)
    for change in ({}, {"parallelism": {"mode": "Auto"}}):
        document = {**made, "spec": {**made["spec"], **change}}
        try:
            found = study(parse(document).spec, CATALOGUE)
        except Refused:
            continue
        # Quantization, lengths and similar come from the author, independent of the sizes.
        of_sizes = {"DoesNotFit", "MaxModelLenDoesNotFit", "HeadsNotDivisible", "KVHeadsNotDivisible"}
        of_sizes |= {"ShardsNotDivisible", "ExpertsNotDivisible", "ExpertMismatch", "TooFewLayers"}
        if found.advice is None or any(each.reason not in of_sizes for each in found.unplannable):
            continue
        assert judged(written(document, found.advice)) == set()
        within = found.advice.option
        sizes = {**within.sizes._asdict(), **({"expert": within.expert} if within.expert > 1 else {})}
        assert judged({**document, "spec": {**document["spec"], "parallelism": sizes}}) == set()


def written(document: dict[str, Any], advice: Advice) -> dict[str, Any]:
    """Return the manifest with the recommendation applied."""
    expert = {"expert": advice.option.expert} if advice.option.expert > 1 else {}
    return {
        **document,
        "spec": {
            **document["spec"],
            "replicas": advice.replicas,
            "hardware": {**document["spec"]["hardware"], "count": advice.count, "nodes": advice.nodes},
            "parallelism": {**advice.sizes._asdict(), **expert},
        },
    }

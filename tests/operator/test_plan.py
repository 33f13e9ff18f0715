"""Catalogue and placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker_operator.api.violation import Refused
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan


def test_all_gpus_hold_one_copy_by_default(endpoint: Any, catalogue: Catalogue) -> None:
    spec = endpoint(hardware={"accelerator": "nvidia-h100-80gb", "count": 8}, engine={"image": "x"}).spec
    placement = plan(spec, catalogue).placement
    assert (placement.tensor, placement.data, placement.count) == (8, 1, 8)


def test_the_image_follows_from_the_accelerator(endpoint: Any, catalogue: Catalogue) -> None:
    assert plan(endpoint().spec, catalogue).image == "stoker/engine-cpu:0.1.0"
    assert plan(endpoint(engine={"image": "mine:1"}).spec, catalogue).image == "mine:1"


@pytest.mark.parametrize(
    ("spec", "reason", "expected"),
    [
        (
            {"hardware": {"accelerator": "nvidia-h100"}},
            "UnknownAccelerator",
            "spec.hardware.accelerator: nvidia-h100 is not in the accelerator catalogue; use one of amd-",
        ),
        (
            {"hardware": {"accelerator": "nvidia-h100-80gb"}},
            "NoImage",
            "spec.engine.image: the catalogue has no cuda image of runtime stoker for nvidia-h100-80gb; set",
        ),
        (
            {"engine": {"runtime": "vllm"}},
            "UnknownRuntime",
            "spec.engine.runtime: there is no runtime vllm; use stoker",
        ),
        (
            {
                "hardware": {"accelerator": "nvidia-l4", "resources": {"limits": {"nvidia.com/gpu": 2}}},
                "engine": {"image": "x"},
            },
            "Invalid",
            "spec.hardware.resources.limits[nvidia.com/gpu]: the accelerators of a pod are said by spec.hardware.count",
        ),
    ],
)
def test_what_the_catalogue_does_not_allow_is_refused(
    endpoint: Any, catalogue: Catalogue, spec: Any, reason: str, expected: str
) -> None:
    with pytest.raises(Refused) as refused:
        plan(endpoint(**spec).spec, catalogue)
    assert str(refused.value).startswith(expected)
    assert refused.value.violations[0].reason == reason


def test_a_file_extends_and_overrides_the_catalogue(endpoint: Any, tmp_path: Path) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text(
        "accelerators: {my-gpu: {resource: example.com/gpu, images: mine}, nvidia-l4: {memoryMiB: 1}}\n"
        "runtimes: {stoker: {mine: image:1}}\n"
    )
    catalogue = Catalogue.load(file)
    assert plan(endpoint(hardware={"accelerator": "my-gpu"}).spec, catalogue).image == "image:1"
    assert catalogue.accelerators["nvidia-l4"].memory_mib == 1
    assert catalogue.accelerators["nvidia-l4"].resource == "nvidia.com/gpu"
    assert plan(endpoint().spec, catalogue).image == "stoker/engine-cpu:0.1.0"


@pytest.mark.parametrize("text", ["accelerators: {a: {image: b}}", "nonsense: 1", "a: b: c", "[]"])
def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text(text)
    if text == "[]":
        assert Catalogue.load(file) == Catalogue.load()
        return
    with pytest.raises(Refused, match=r"catalogue\.yaml"):
        Catalogue.load(file)

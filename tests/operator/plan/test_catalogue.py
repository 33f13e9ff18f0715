"""The catalogue: its content, what it refuses, and an administrator's overrides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.contract.names import DTYPES, KV_CACHE_DTYPES
from stoker_operator.api.violation import Refused
from stoker_operator.plan.catalogue import Accelerator, Catalogue, Support
from stoker_operator.plan.planner import plan

#: All keys that users may rely on, with the memory that drivers report, if it has been observed.
KEYS = {
    "nvidia-a10g": 23028,
    "nvidia-a100-40gb": 40960,
    "nvidia-a100-80gb": 81920,
    "nvidia-h100-80gb": 81559,
    "nvidia-h200": 143771,
    "nvidia-l4": 23034,
    "nvidia-t4": 15360,
    "nvidia-l40s": 46068,
    "nvidia-l20": 46068,
    "nvidia-l40": 46068,
    "nvidia-h100-nvl": 95830,
    "nvidia-h20": 97871,
    "nvidia-gh200": 97871,
    "nvidia-b200": 183359,
    "nvidia-gb200": 189471,
    "nvidia-b300": 275040,
    "nvidia-gb300": 284208,
    "nvidia-rtx-pro-6000": 97887,
    "amd-mi250": 65520,
    "amd-mi300x": 196592,
    "amd-mi325x": None,
    "amd-mi350x": 294896,
    "amd-mi355x": 294896,
    "aws-inferentia2": None,
    "aws-trainium": None,
    "google-tpu-v5e": None,
    "google-tpu-v6e": None,
    "intel-gaudi2": None,
    "intel-gaudi3": None,
    "ibm-spyre": None,
    "huawei-ascend-910b": None,
}


@pytest.mark.parametrize("key", KEYS)
def test_each_accelerator_has_resource_memory_and_labels(catalogue: Catalogue, key: str) -> None:
    accelerator = catalogue.accelerator(key)
    assert accelerator.resource and "/" in accelerator.resource
    assert accelerator.memory_mib is not None
    if KEYS[key] is not None:
        assert accelerator.memory_mib == KEYS[key]
    # Labels of nodes, valid for the API server.
    for label, values in accelerator.node_labels.items():
        assert re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", label)
        assert values
        assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value) for value in values)
    for toleration in accelerator.tolerations:
        assert toleration.key == accelerator.resource


def test_catalogue_has_exactly_the_documented_accelerators(catalogue: Catalogue) -> None:
    assert set(catalogue.accelerators) == {"cpu", *KEYS}
    assert catalogue.accelerator("cpu").memory_mib is None


@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
def test_supported_formats_are_known_for_every_gpu(catalogue: Catalogue, runtime: str) -> None:
    for key in KEYS:
        if key.startswith(("nvidia", "amd")):
            known = catalogue.support(runtime, key)
            assert known.dtypes and known.kv_cache_dtypes and known.quantizations
            assert set(known.dtypes) < set(DTYPES)
            assert set(known.kv_cache_dtypes) <= set(KV_CACHE_DTYPES)


def test_every_image_kind_belongs_to_an_accelerator(catalogue: Catalogue) -> None:
    kinds = {accelerator.images for accelerator in catalogue.accelerators.values()}
    architectures = {accelerator.arch for accelerator in catalogue.accelerators.values()}
    for runtime in catalogue.runtimes.values():
        assert set(runtime) <= kinds
    for known in catalogue.supports.values():
        assert set(known) <= architectures
    assert set(catalogue.supports) <= set(catalogue.runtimes)
    assert set(catalogue.releases) <= set(catalogue.runtimes)


@pytest.mark.parametrize("key", ["intel-gaudi3", "aws-trainium", "ibm-spyre", "huawei-ascend-910b"])
def test_an_accelerator_without_an_image_is_refused_by_name(catalogue: Catalogue, key: str) -> None:
    with pytest.raises(Refused, match=f"the catalogue has no [a-z]+ image of runtime vllm for {key}"):
        catalogue.image("vllm", key)


def test_image_follows_from_the_accelerator(endpoint: Any, catalogue: Catalogue) -> None:
    assert plan(endpoint().spec, catalogue).image == "stoker/engine-cpu:0.1.0"
    assert plan(endpoint(engine={"image": "mine:1"}).spec, catalogue).image == "mine:1"


@pytest.mark.parametrize(
    ("spec", "reason", "expected"),
    [
        (
            {"hardware": {"accelerator": "nvidia-h100"}},
            "UnknownAccelerator",
            "spec.hardware.accelerator: nvidia-h100 is not in the accelerator catalogue; did you mean nvidia-h100-",
        ),
        (
            {"hardware": {"accelerator": "nothing"}},
            "UnknownAccelerator",
            "spec.hardware.accelerator: nothing is not in the accelerator catalogue; use one of amd-",
        ),
        (
            {"hardware": {"accelerator": "nvidia-h200-141gb"}},
            "UnknownAccelerator",
            "spec.hardware.accelerator: nvidia-h200-141gb is not in the accelerator catalogue; did you mean "
            "nvidia-h200? If not, use one of ",
        ),
        (
            {"hardware": {"accelerator": "nvidia-l40-s"}},
            "UnknownAccelerator",
            "spec.hardware.accelerator: nvidia-l40-s is not in the accelerator catalogue; did you mean nvidia-l40",
        ),
        (
            {"hardware": {"accelerator": "nvidia-h100-80gb"}},
            "NoImage",
            "spec.engine.image: the catalogue has no cuda image of runtime stoker for nvidia-h100-80gb; set "
            "spec.engine.image or the catalogue's runtimes.stoker.cuda to one that `images/build engine-cuda` builds "
            "(docs/guides/gpu.md), or use runtime vllm",
        ),
        (
            {"engine": {"runtime": "sglang"}},
            "UnknownRuntime",
            "spec.engine.runtime: there is no runtime sglang; use stoker or vllm",
        ),
        (
            {
                "hardware": {"accelerator": "nvidia-l4", "resources": {"limits": {"nvidia.com/gpu": 2}}},
                "engine": {"image": "x"},
            },
            "Invalid",
            "spec.hardware.resources.limits[nvidia.com/gpu]: spec.hardware.count states the number of accelerators",
        ),
    ],
)
def test_specs_outside_the_catalogue_are_refused(
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
        "supports: {stoker: {cpu: {dtypes: [float32]}}}\n"
        "runtimes: {stoker: {mine: image:1}}\n"
    )
    catalogue = Catalogue.load(file)
    assert plan(endpoint(hardware={"accelerator": "my-gpu"}).spec, catalogue).image == "image:1"
    assert catalogue.accelerators["nvidia-l4"].memory_mib == 1
    assert catalogue.accelerators["nvidia-l4"].resource == "nvidia.com/gpu"
    assert catalogue.support("stoker", "cpu").dtypes == ["float32"]
    assert catalogue.support("stoker", "cpu").kv_cache_dtypes == list(KV_CACHE_DTYPES)
    assert catalogue.support("stoker", "my-gpu").dtypes is None  # unknown support is not checked
    assert plan(endpoint().spec, catalogue).image == "stoker/engine-cpu:0.1.0"


@pytest.mark.parametrize(
    "content", [b"accelerators: {a: {image: b}}", b"nonsense: 1", b"a: b: c", b"# caf\xe9\n", b"a: \x00", b"[]"]
)
def test_malformed_catalogue_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_bytes(content)
    if content == b"[]":
        assert Catalogue.load(file) == Catalogue.load()
        return
    with pytest.raises(Refused, match=r"catalogue\.yaml"):
        Catalogue.load(file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("nonsense: 1", "nonsense: there is no such field; the fields are accelerators, supports, "),
        (
            "accelerators: {nvidia-l4: {memoryMib: 1}}",
            "accelerators.nvidia-l4.memoryMib: there is no such field; did you mean memoryMiB?",
        ),
        (
            "accelerators: {nvidia-l4: {tolerations: [{keys: a}]}}",
            "accelerators.nvidia-l4.tolerations[0].keys: there is no such field; did you mean key?",
        ),
        (
            "supports: {vllm: {cpu: {dtype: []}}}",
            "supports.vllm.cpu.dtype: there is no such field; did you mean dtypes?",
        ),
        (
            'accelerators: {nvidia-l4: {maxCount: "8"}}',
            "accelerators.nvidia-l4.maxCount: input should be a valid integer, not '8'; remove the quotes",
        ),
    ],
)
def test_wrong_fields_of_a_catalogue_are_named(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text(content)
    with pytest.raises(Refused) as refused:
        Catalogue.load(file)
    assert str(refused.value).startswith(f"catalogue {file}: {expected}")


def test_charts_schema_has_the_fields_of_the_catalogue() -> None:
    """Helm refuses fields that the schema lacks, so that the operator would never see them."""
    schema = json.loads((Path(__file__).parents[3] / "charts/stoker/values.schema.json").read_text())
    catalogue = schema["properties"]["catalogue"]["properties"]
    accelerator = catalogue["accelerators"]["additionalProperties"]
    support = catalogue["supports"]["additionalProperties"]["additionalProperties"]
    for found, model in ((accelerator, Accelerator), (support, Support)):
        assert set(found["properties"]) == {field.alias for field in model.model_fields.values()}

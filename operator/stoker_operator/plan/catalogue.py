"""The catalogue of accelerators and engine images: `catalogue.yaml` beside this file.

An administrator's file of the same form may add entries and replace fields of entries.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from stoker_engine.contract.names import Device
from stoker_operator.api.validation_error import violation_of
from stoker_operator.api.violation import Refused, Violation

#: Node label with the product of NVIDIA's devices, and suffix of the keys of their time-sliced shares.
_PRODUCT: Final = "nvidia.com/gpu.product"
_SHARED: Final = "-shared"

#: Kinds of images of runtime stoker that ``images/build engine-KIND`` builds, and that are not published.
_BUILT: Final = ("cuda", "rocm")

BUILT_IN = Path(__file__).with_name("catalogue.yaml")


class _Entry(BaseModel):
    """Base of the file's entries: camelCase names; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)


class Toleration(_Entry):
    """A toleration, as in core/v1."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Accelerator(_Entry):
    """One kind of accelerator.

    Attributes:
        memory_mib: memory of one accelerator in MiB, as its driver reports it; None for the container's memory (CPU).
        resource: resource name of its device plugin; None for processors, which every node has.
        device: the engine's ``--device``.
        arch: key of its entries in `Catalogue.supports`.
        images: kind of image that runs on it, as in `Catalogue.runtimes`.
        node_labels: labels that distinguish its nodes from others: key → possible values.
        tolerations: tolerations of the taints that keep other pods off its nodes.
        max_count: maximum number that a pod can use together; None without a limit.
        topology_label: node label by which a pod selects the topology of its slice; None if it need not.
        shared: whether it is a share of a device whose memory other pods also use.
    """

    memory_mib: Annotated[int | None, Field(alias="memoryMiB", ge=1)] = None
    resource: str | None = None
    device: Device = "auto"
    arch: str | None = None
    images: str
    node_labels: dict[str, list[str]] = {}
    tolerations: list[Toleration] = []
    max_count: Annotated[int | None, Field(ge=1)] = None
    topology_label: str | None = None
    shared: bool = False

    @property
    def max_per_pod(self) -> int | None:
        """Maximum number of these accelerators that a pod can use together; None without a limit.

        It is 1 for MIG slices, of which a process sees only one (NVIDIA, "MIG User Guide"). They are recognized by
        name: resource ``nvidia.com/mig-3g.40gb``, or ``-MIG-3g.40gb`` in the product.
        """
        products = [value for values in self.node_labels.values() for value in values]
        sliced = (self.resource or "").startswith("nvidia.com/mig-") or any("-MIG-" in each for each in products)
        return 1 if sliced else self.max_count


class Support(_Entry):
    """What a runtime supports on one architecture. A field that is None is unknown, and not checked."""

    dtypes: list[str] | None = None
    kv_cache_dtypes: list[str] | None = None
    quantizations: list[str] | None = None


class Release(_Entry):
    """Limits of a runtime's current release, beyond which the planner only warns. A field that is None sets no limit.

    Attributes:
        devices: maximum number of accelerators that a replica uses, or of its ranks on a CPU.
        quantized_on: archs on which it has kernels for quantized weights; elsewhere it dequantizes them in every step.
    """

    devices: int | None = None
    kv_cache_dtypes: list[str] | None = None
    quantizations: list[str] | None = None
    quantized_on: list[str] | None = None


class Catalogue(BaseModel):
    """Accelerators by key, what runtimes support on them, and images by runtime and kind.

    `registry` is the registry of images that name none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    accelerators: dict[str, Accelerator]
    supports: dict[str, dict[str, Support]] = {}
    releases: dict[str, Release] = {}
    runtimes: dict[str, dict[str, str]]
    registry: str = ""

    @classmethod
    def load(cls, override: Path | None = None) -> Catalogue:
        """Return the built-in catalogue, with the file `override` merged over it.

        Raises:
            Refused: the file cannot be read, or is not a catalogue.
        """
        if override is None:
            return _built_in()
        field = f"catalogue {override}"
        try:
            document = yaml.safe_load(override.read_text(encoding="utf-8")) or {}
            return cls.model_validate(_overlay(yaml.safe_load(BUILT_IN.read_text(encoding="utf-8")), document))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Refused(Violation(field, f"the file cannot be read: {error}")) from None
        except ValidationError as error:
            faults = (violation_of(dict(item), cls) for item in error.errors())
            raise Refused(*(replace(fault, field=f"{field}: {fault.field}") for fault in faults)) from None

    def accelerator(self, key: str) -> Accelerator:
        """Return the accelerator called `key`.

        Raises:
            Refused: the catalogue lacks it.
        """
        if key in self.accelerators:
            return self.accelerators[key]
        shared = self._share(key)
        if shared is not None:
            return shared
        similar = sorted(each for each in self.accelerators if key in each or key.startswith(f"{each}-"))
        similar = similar or get_close_matches(key, self.accelerators)
        others = f"did you mean {' or '.join(similar)}? If not, " if similar else ""
        raise Refused(
            Violation(
                "spec.hardware.accelerator",
                f"{key} is not in the accelerator catalogue",
                f"{others}use one of {', '.join(sorted(self.accelerators))}, or add it to the catalogue (`--catalogue "
                "FILE`; for the operator the Helm chart's value `catalogue`)",
                reason="UnknownAccelerator",
            )
        )

    def _share(self, key: str) -> Accelerator | None:
        """Return the share of a time-sliced device, by the device's key with the suffix ``-shared``; None if there is
        no such device.

        NVIDIA's feature discovery appends ``-SHARED`` to the product of such devices. A pod can use one share.
        """
        device = self.accelerators.get(key.removesuffix(_SHARED))
        products = device.node_labels.get(_PRODUCT) if device is not None and key.endswith(_SHARED) else None
        if device is None or not products:
            return None
        labels = {**device.node_labels, _PRODUCT: [f"{product}{_SHARED.upper()}" for product in products]}
        return device.model_copy(update={"node_labels": labels, "max_count": 1, "shared": True})

    def every_key(self) -> list[str]:
        """Return every key that `accelerator` accepts; those of shared devices come last."""
        return [*self.accelerators, *(f"{key}{_SHARED}" for key in self.accelerators if self._share(f"{key}{_SHARED}"))]

    def image(self, runtime: str, key: str) -> str:
        """Return the image that runs `runtime` on the accelerator called `key`.

        Raises:
            Refused: the runtime is unknown, or has no image for the accelerator.
        """
        kind = self.accelerator(key).images
        images = self.images_of(runtime)
        if kind in images:
            return _in_registry(self.registry, images[kind])
        alternatives = sorted(name for name, kinds in self.runtimes.items() if kind in kinds)
        ways = [f"use runtime {' or '.join(alternatives)}"] if alternatives else []
        if runtime == "stoker" and kind in _BUILT:
            image = f"one that `images/build engine-{kind}` builds (docs/guides/gpu.md)"
            ways = [f"set spec.engine.image or the catalogue's runtimes.stoker.{kind} to {image}", *ways]
        else:
            ways = ["set spec.engine.image", *ways, "name another accelerator"]
        raise Refused(
            Violation(
                "spec.engine.image",
                f"the catalogue has no {kind} image of runtime {runtime} for {key}",
                f"{', '.join(ways[:-1])}, or {ways[-1]}" if ways[1:] else ways[0],
                reason="NoImage",
            )
        )

    def images_of(self, runtime: str) -> dict[str, str]:
        """Return the images of `runtime`, by kind.

        Raises:
            Refused: the runtime is unknown.
        """
        if runtime in self.runtimes:
            return self.runtimes[runtime]
        raise Refused(
            Violation(
                "spec.engine.runtime",
                f"there is no runtime {runtime}",
                f"use {' or '.join(sorted(self.runtimes))}",
                reason="UnknownRuntime",
            )
        )

    def support(self, runtime: str, key: str) -> Support:
        """Return what `runtime` supports on the accelerator called `key`.

        Raises:
            Refused: the accelerator is unknown.
        """
        arch = self.accelerator(key).arch
        return self.supports.get(runtime, {}).get(arch or "", Support())


def _in_registry(registry: str, image: str) -> str:
    """Return the image, prefixed with `registry` unless its first part looks like a registry's host."""
    first, slash, _ = image.partition("/")
    names_one = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return image if names_one or not registry else f"{registry}/{image}"


@cache
def _built_in() -> Catalogue:
    return Catalogue.model_validate(yaml.safe_load(BUILT_IN.read_text(encoding="utf-8")))


def _overlay(below: Any, above: Any) -> Any:
    """Return `above` merged over `below`: mappings are merged, other values are replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _overlay(below.get(key), value) for key, value in above.items()}

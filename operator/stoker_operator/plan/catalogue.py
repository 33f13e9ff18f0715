"""What is known of accelerators and of the images that serve them: data, shipped beside this file.

An administrator's file of the same form is laid over it: entries are added, and fields of entries replaced.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from stoker_engine.contract.names import Device
from stoker_operator.api.violation import Refused, Violation

#: NVIDIA's label for the product, and what is put behind one whose devices are time-sliced.
_PRODUCT: Final = "nvidia.com/gpu.product"
_SHARED: Final = "-shared"
BUILT_IN = Path(__file__).with_name("catalogue.yaml")


class _Entry(BaseModel):
    """A part of the file: camelCase, and nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)


class Toleration(_Entry):
    """A taint that pods are not kept away by, as in core/v1."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Accelerator(_Entry):
    """One kind of accelerator.

    Attributes:
        memory_mib: memory of one, as its driver reports it; None where it is the container's.
        resource: what its device plugin calls it; None for what every node has.
        device: what the engine runs on (``--device``).
        arch: its name in `Catalogue.supports`.
        images: which kind of image serves it.
        node_labels: that distinguish its nodes from others: key → any of these values.
        tolerations: of the taints that keep other pods from its nodes.
        max_count: the most that a pod can use together; None: any number.
        topology_label: by which a pod selects the shape of the slice whose chips it has; None: it need not.
        shared: one is a share of a device, whose memory others use as well.
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
        """The most that a pod can use together. A process sees one slice of a GPU only (NVIDIA, "MIG User Guide"), so
        slices are known for what they are by their names as well: ``nvidia.com/mig-3g.40gb``, or a product's
        ``-MIG-3g.40gb``."""
        products = [value for values in self.node_labels.values() for value in values]
        sliced = (self.resource or "").startswith("nvidia.com/mig-") or any("-MIG-" in each for each in products)
        return 1 if sliced else self.max_count


class Support(_Entry):
    """What a runtime computes on one architecture. None: it is not known, and not judged."""

    dtypes: list[str] | None = None
    kv_cache_dtypes: list[str] | None = None
    quantizations: list[str] | None = None


class Release(_Entry):
    """What the release of a runtime does, of what is planned for it. None: all of it.

    Attributes:
        devices: the most accelerators of a pod, or ranks of a CPU.
        quantized_on: the archs on which it has kernels for quantized weights; elsewhere it dequantizes them in every
            step.
    """

    devices: int | None = None
    kv_cache_dtypes: list[str] | None = None
    quantizations: list[str] | None = None
    quantized_on: list[str] | None = None


class Catalogue(BaseModel):
    """The accelerators by key, what runtimes do on them, and the images by runtime and kind; `registry` is where images
    are that name none themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    accelerators: dict[str, Accelerator]
    supports: dict[str, dict[str, Support]] = {}
    releases: dict[str, Release] = {}
    runtimes: dict[str, dict[str, str]]
    registry: str = ""

    @classmethod
    def load(cls, override: Path | None = None) -> Catalogue:
        """The built-in catalogue with the file `override` laid over it.

        Raises:
            Refused: the file is not a catalogue.
        """
        if override is None:
            return _built_in()
        field = f"catalogue {override}"
        try:
            document = yaml.safe_load(override.read_text()) or {}
            return cls.model_validate(_overlay(yaml.safe_load(BUILT_IN.read_text()), document))
        except (OSError, yaml.YAMLError) as error:
            raise Refused(Violation(field, f"it cannot be read: {error}")) from None
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise Refused(*(Violation(field, fault) for fault in faults)) from None

    def accelerator(self, key: str) -> Accelerator:
        """The accelerator called `key`.

        Raises:
            Refused: there is none.
        """
        if key in self.accelerators:
            return self.accelerators[key]
        shared = self._share(key)
        if shared is not None:
            return shared
        raise Refused(
            Violation(
                "spec.hardware.accelerator",
                f"{key} is not in the accelerator catalogue",
                f"use one of {', '.join(sorted(self.accelerators))}, or add it in the Helm chart's value `catalogue`",
                reason="UnknownAccelerator",
            )
        )

    def _share(self, key: str) -> Accelerator | None:
        """A time-sliced device, by the key of the device with ``-shared`` behind it; None where it has no such thing.
        Feature discovery puts ``-SHARED`` behind its product, and the device plugin gives each pod one of them."""
        device = self.accelerators.get(key.removesuffix(_SHARED))
        products = device.node_labels.get(_PRODUCT) if device is not None and key.endswith(_SHARED) else None
        if device is None or not products:
            return None
        labels = {**device.node_labels, _PRODUCT: [f"{product}{_SHARED.upper()}" for product in products]}
        return device.model_copy(update={"node_labels": labels, "max_count": 1, "shared": True})

    def every_key(self) -> list[str]:
        """Every key that `accelerator` accepts, those of shared devices behind the others."""
        return [*self.accelerators, *(f"{key}{_SHARED}" for key in self.accelerators if self._share(f"{key}{_SHARED}"))]

    def image(self, runtime: str, key: str) -> str:
        """The image that runs `runtime` on the accelerator called `key`.

        Raises:
            Refused: there is no such runtime, or no image of it for the accelerator.
        """
        kind = self.accelerator(key).images
        images = self.images_of(runtime)
        if kind in images:
            return _in_registry(self.registry, images[kind])
        alternatives = sorted(name for name, kinds in self.runtimes.items() if kind in kinds)
        also = f", use runtime {' or '.join(alternatives)}" if alternatives else ""
        raise Refused(
            Violation(
                "spec.engine.image",
                f"the catalogue has no {kind} image of runtime {runtime} for {key}",
                f"set spec.engine.image{also}, or name another accelerator",
                reason="NoImage",
            )
        )

    def images_of(self, runtime: str) -> dict[str, str]:
        """The images of `runtime`, by kind.

        Raises:
            Refused: there is no such runtime.
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
        """What `runtime` computes on the accelerator called `key`.

        Raises:
            Refused: there is no such accelerator.
        """
        arch = self.accelerator(key).arch
        return self.supports.get(runtime, {}).get(arch or "", Support())


def _in_registry(registry: str, image: str) -> str:
    """The image, from `registry` unless it names one itself: its first part then looks like a host."""
    first, slash, _ = image.partition("/")
    names_one = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return image if names_one or not registry else f"{registry}/{image}"


@cache
def _built_in() -> Catalogue:
    return Catalogue.model_validate(yaml.safe_load(BUILT_IN.read_text()))


def _overlay(below: Any, above: Any) -> Any:
    """`above` laid over `below`: mappings are merged, everything else is replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _overlay(below.get(key), value) for key, value in above.items()}

"""What is known of accelerators and of the images that serve them: data, shipped beside this file.

An administrator's file of the same form is laid over it: entries are added, and fields of entries replaced.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from stoker_engine.contract.names import Device
from stoker_operator.api.violation import Refused, Violation

BUILT_IN = Path(__file__).with_name("catalogue.yaml")


class Accelerator(BaseModel):
    """One kind of accelerator.

    Attributes:
        memory_mib: memory of one, as its driver reports it; None where it is the container's.
        resource: what its device plugin calls it; None for what every node has.
        device: what the engine is told to run on.
        images: which kind of image serves it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)

    memory_mib: Annotated[int | None, Field(alias="memoryMiB", ge=1)] = None
    resource: str | None = None
    device: Device = "auto"
    images: str


class Catalogue(BaseModel):
    """The accelerators by key, and the images by runtime and kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    accelerators: dict[str, Accelerator]
    runtimes: dict[str, dict[str, str]]

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
        raise Refused(
            Violation(
                "spec.hardware.accelerator",
                f"{key} is not in the accelerator catalogue",
                f"use one of {', '.join(sorted(self.accelerators))}, or add it in the Helm chart's value `catalogue`",
                reason="UnknownAccelerator",
            )
        )

    def image(self, runtime: str, key: str) -> str:
        """The image that runs `runtime` on the accelerator called `key`.

        Raises:
            Refused: there is none.
        """
        kind = self.accelerator(key).images
        if kind in self.runtimes[runtime]:
            return self.runtimes[runtime][kind]
        raise Refused(
            Violation(
                "spec.engine.image",
                f"the catalogue has no {kind} image of runtime {runtime} for {key}",
                "set spec.engine.image, or name another accelerator",
                reason="NoImage",
            )
        )


@cache
def _built_in() -> Catalogue:
    return Catalogue.model_validate(yaml.safe_load(BUILT_IN.read_text()))


def _overlay(below: Any, above: Any) -> Any:
    """`above` laid over `below`: mappings are merged, everything else is replaced."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _overlay(below.get(key), value) for key, value in above.items()}

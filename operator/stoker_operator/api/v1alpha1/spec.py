"""What a user asks for."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.engine import Engine
from stoker_operator.api.v1alpha1.exposure import Rollout, Service
from stoker_operator.api.v1alpha1.hardware import CPU, Hardware, Parallelism
from stoker_operator.api.v1alpha1.model import Model
from stoker_operator.api.v1alpha1.parallelism import FILLS_THE_POD
from stoker_operator.api.v1alpha1.storage import Storage


class Spec(Part):
    """What is served, on what, and how."""

    model: Model
    """Which model is served, and by which names."""
    replicas: Annotated[
        int,
        # The scale subresource needs a number to be there, so this default is written into the object.
        Field(ge=0, le=10000, json_schema_extra={"x-default": 1}),
    ] = 1
    """Pods that serve the model. Autoscalers write it through the scale subresource."""
    hardware: Hardware
    """What one pod runs on."""
    parallelism: Parallelism | None = None
    """How the accelerators of a pod share the work. tensor × data must equal hardware.count. Both absent: tensor takes
    all of them and data is 1; one of them given: the other is what is left."""
    engine: Engine = Engine()
    """The engine that runs in each pod. What is absent is left to the engine's own default."""
    storage: Storage = Storage()
    """Storage of each pod."""
    service: Service = Service()
    """The Service in front of the pods. It has the endpoint's name."""
    rollout: Rollout = Rollout()
    """How pods are replaced when the spec changes."""

    RULES: ClassVar = (
        FILLS_THE_POD,
        Rule(
            field="parallelism",
            holds=lambda it: (
                it.hardware.accelerator != CPU
                or it.parallelism is None
                or (it.parallelism.tensor in (None, 1) and it.parallelism.data in (None, 1))
            ),
            cel=f"self.hardware.accelerator != '{CPU}' || !has(self.parallelism) || ("
            "(!has(self.parallelism.tensor) || self.parallelism.tensor == 1) && "
            "(!has(self.parallelism.data) || self.parallelism.data == 1))",
            message="accelerator cpu runs one copy of the model, unsplit",
            remedy="remove parallelism, and use spec.replicas for more copies",
        ),
        Rule(
            field="engine.kvCacheDtype",
            holds=lambda it: it.hardware.accelerator != CPU or it.engine.kv_cache_dtype in (None, "auto"),
            cel=f"self.hardware.accelerator != '{CPU}' || !has(self.engine) || !has(self.engine.kvCacheDtype)"
            " || self.engine.kvCacheDtype == 'auto'",
            message="the engine has no fp8 key-value cache on accelerator cpu",
            remedy="use auto, or remove the field",
        ),
    )

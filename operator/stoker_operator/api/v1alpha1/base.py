"""What every part of the resource has in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from stoker_operator.api.rule import Rule

# Kubernetes' own grammar of quantities such as 500m, 4, 16Gi, 1e3.
QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)


def _say_amount(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:  # one for the number and one for the string, of which neither helps
        raise PydanticCustomError("quantity", "this is no amount such as 500m, 4 or 16Gi") from None


#: The name of another object in the same namespace.
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
#: A key of a ConfigMap or Secret.
DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Quantity = Annotated[
    int | Annotated[str, Field(max_length=64, pattern=QUANTITY_PATTERN)],
    WrapValidator(_say_amount),
    # An amount may be written 4 or "4"; this is how a structural schema says so.
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]


def _write_rules(schema: dict[str, Any], model: type[Any]) -> None:
    if model.RULES:
        schema["x-kubernetes-validations"] = [rule.validation() for rule in model.RULES]


class Part(BaseModel):
    """A part of the resource: camelCase outside, nothing unknown accepted, nothing converted silently.

    Its docstring and those of its fields become what ``kubectl explain`` shows.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        json_schema_extra=_write_rules,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """``field:`` with nothing behind it says nothing; the API server prunes it as well."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

"""Base class and field types of the resource's parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from stoker_operator.api.rule import ChangeRule, Rule

# Kubernetes' grammar of quantities such as 500m, 4, 16Gi, 1e3, without negative ones.
QUANTITY_PATTERN = r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"


def _say_amount(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:  # it has an error for each type of the union; this message replaces both
        raise PydanticCustomError("quantity", "should be an amount such as 500m, 4 or 16Gi") from None


def _say_share(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:
        raise PydanticCustomError("share", "should be a number up to 1000 or a percentage such as 25%") from None


def _unique_names(items: list[Any]) -> list[Any]:
    _once([item.name for item in items])
    return items


def _unique(items: list[Any]) -> list[Any]:
    _once(items)
    return items


def _once(keys: list[Any]) -> None:
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise PydanticCustomError("duplicate", "{name} is listed twice", {"name": repr(twice)})


#: A list of named items with unique names; server-side apply merges it by name.
ByName = (
    AfterValidator(_unique_names),
    Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
)
#: A list of unique values.
EachOnce = (AfterValidator(_unique), Field(json_schema_extra={"x-kubernetes-list-type": "set"}))

#: Name of another object.
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
#: A key of a ConfigMap or Secret.
DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Quantity = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[str, Field(max_length=64, pattern=QUANTITY_PATTERN)],
    WrapValidator(_say_amount),
    # The structural schema's way to allow both 4 and "4".
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
#: A number, or a percentage.
IntOrPercent = Annotated[
    Annotated[int, Field(ge=0, le=1000)] | Annotated[str, Field(max_length=4, pattern=r"^(0|[1-9][0-9]?|100)%$")],
    WrapValidator(_say_share),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]
Labels = Annotated[dict[str, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
#: Labels by which the operator selects an endpoint's objects; users cannot set them.
OWN_LABELS: Final = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "stoker.dev/workload",
)


def _key(letters: str) -> str:
    label = f"[{letters}]([-{letters}]*[{letters}])?"
    return rf"^({label}(\.{label})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"


def without_own_labels(objects: str) -> Rule:
    """Return the rule that a part's `labels` have none of those by which the operator selects `objects`."""
    return Rule(
        field="labels",
        holds=lambda it: not any(label in (it.labels or {}) for label in OWN_LABELS),
        cel=f"!has(self.labels) || !{list(OWN_LABELS)}.exists(label, label in self.labels)",
        message=f"one of the labels is reserved: the operator selects {objects} by it",
        remedy=f"use labels other than {', '.join(OWN_LABELS)}",
    )


#: Kubernetes' grammar of label and annotation keys, without the limit on the prefix's length. Prefixes of annotations
#: may have capitals.
LABEL_KEY: Final = _key("a-z0-9")
ANNOTATION_KEY: Final = _key("A-Za-z0-9")
_PREFIX: Final = 253
_KEY_REMEDY: Final = (
    "use NAME or PREFIX/NAME, where NAME has at most 63 letters, digits, '-', '_' and '.', begins and ends with a "
    "letter or digit, and PREFIX is a domain"
)


def right_keys(field: str, pattern: str, keys_of: Callable[[Any], Mapping[str, str] | None]) -> Rule:
    """Return the rule that the keys of the labels or annotations in `field` match `pattern`.

    A structural schema can constrain the values of a map, but not its keys.
    """
    return Rule(
        field=field,
        holds=lambda it: all(re.fullmatch(pattern, key) and key.find("/") <= _PREFIX for key in keys_of(it) or ()),
        cel=f"!has(self.{field}) || self.{field}.all(key, key.matches(r'{pattern}') && key.indexOf('/') <= {_PREFIX})",
        message="Kubernetes does not allow one of the keys",
        remedy=_KEY_REMEDY,
    )


#: Rules of a part with `labels` and `annotations`.
METADATA_KEYS: Final = (
    right_keys("labels", LABEL_KEY, lambda it: it.labels),
    right_keys("annotations", ANNOTATION_KEY, lambda it: it.annotations),
)

#: Marks a field (in ``Annotated``) whose change does not replace pods.
NOT_IN_PODS = object()


def _write_rules(schema: dict[str, Any], model: type[Any]) -> None:
    rules = (*model.RULES, *model.CHANGES)
    if rules:
        schema["x-kubernetes-validations"] = [rule.validation() for rule in rules]


class Part(BaseModel):
    """Base of the resource's parts: camelCase names, no unknown fields, no implicit conversions.

    ``kubectl explain`` shows the docstrings of a part and of its fields.
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
    CHANGES: ClassVar[tuple[ChangeRule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """Treat null as absent, like the API server, which prunes nulls."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

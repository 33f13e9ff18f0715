"""Label selectors, as in meta/v1."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import LABEL_KEY, Labels, LabelValue, Part, right_keys


class SelectorRequirement(Part):
    """A requirement on a label, as in meta/v1."""

    key: Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY)]
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """Relation of the label to the values."""
    values: Annotated[list[LabelValue], Field(max_length=64)] | None = None
    """The values, for In and NotIn only."""

    RULES: ClassVar = (
        Rule(
            field="values",
            holds=lambda it: bool(it.values) == (it.operator in ("In", "NotIn")),
            cel="(has(self.values) && self.values.size() > 0) == (self.operator in ['In', 'NotIn'])",
            message="In and NotIn need values, Exists and DoesNotExist do not allow them",
            remedy="set values, or remove them",
        ),
    )


class LabelSelector(Part):
    """A label selector, as in meta/v1."""

    match_labels: Labels | None = None
    """Required labels and their values."""
    match_expressions: Annotated[list[SelectorRequirement], Field(max_length=64)] | None = None
    """Further requirements on labels."""

    RULES: ClassVar = (right_keys("matchLabels", LABEL_KEY, lambda it: it.match_labels),)

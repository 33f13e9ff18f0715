"""Types of the fields of request bodies.

Bodies may be large and are validated in the event loop. So lists fail at their first invalid element, and few
unknown names are collected, instead of millions of errors of which one is shown.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stoker_engine.core.sampling_params import MAX_LOGIT_BIAS, MAX_N

#: Maximum number of stop strings; every new piece of text is searched for each.
MAX_STOPS: Final = 16
#: Maximum number of bad words; each is checked at every step.
MAX_BAD_WORDS: Final = 256
#: Maximum number of members of `metadata`; OpenAI's limit.
MAX_METADATA: Final = 16
#: Form of request ids, which are written into headers and logs.
REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")


class StrictModel(BaseModel):
    """Refuses unknown fields and implicit conversions, such as a string for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        """Limit the number of unknown names: collecting errors for a million of them would take seconds."""
        fields = cls.__pydantic_fields__  # `model_fields` takes a microsecond, and a body may have very many messages
        if not isinstance(data, dict) or len(data) <= len(fields):
            return data
        known = [info.alias or name for name, info in fields.items()]
        unknown = next(name for name in data if name not in known)
        return {name: data[name] for name in (*known, unknown) if name in data}


def or_else(sentence: str) -> WrapValidator:
    """Return a validator that reports `sentence` instead of pydantic's errors for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", "{sentence}", {"sentence": sentence}) from None

    return WrapValidator(validate)


Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
#: -1 means all.
CountOrAll = Annotated[int, Field(ge=-1, lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Width = Annotated[int, Field(ge=1, le=MAX_N)]
TokenIds = Annotated[list[Int64], Field(fail_fast=True)]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)],
    or_else(f"must be a string or a list of at most {MAX_STOPS} strings"),
]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]


def at_most(limit: int) -> BeforeValidator:
    """Return a validator for objects of at most `limit` members. It refuses larger ones before validating members."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            sentence = f"must hold at most {limit} members"
            raise PydanticCustomError("too_long", "{sentence}", {"sentence": sentence})
        return value

    return BeforeValidator(check)


Metadata = Annotated[dict[str, str], at_most(MAX_METADATA)]
LogitBias = Annotated[
    Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS),
        at_most(MAX_LOGIT_BIAS),
    ],
    or_else(f"must map at most {MAX_LOGIT_BIAS} token ids to numbers between -100 and 100"),
]
#: vLLM's rule: the excluded characters are special to cache back ends.
CacheSalt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
#: Reasoning effort.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")]


def _prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a prompt by its types only: pydantic would try each union member on millions of tokens."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds == {list}:
            kinds = set(chain.from_iterable(map(type, inner) for inner in value))
            fine = kinds == {int} or not kinds
        else:
            fine = kinds in ({str}, {int}, set())
    else:
        fine = isinstance(value, str)
    if not fine:
        sentence = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise PydanticCustomError("shape", "{sentence}", {"sentence": sentence})
    return value


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_prompt)]


T = TypeVar("T")


def _is_none(value: Any) -> bool:
    return value is None


#: A response field that is omitted if it is None.
Extra = Annotated[T | None, Field(exclude_if=_is_none)]

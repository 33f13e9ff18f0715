"""The grammar of an output, as sent to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: Error for a grammar with a model that has no end-of-sequence token.
NO_END: Final = (
    "structured_outputs needs an end-of-sequence token to end a complete output, and this model has none (set "
    "eos_token_id in its config.json)"
)


@dataclass(frozen=True)
class Grammar:
    """The grammar of an output.

    Attributes:
        source: the validated grammar in llguidance's serialized form.
        begins_after: see `StructuredOutputs`.
        compiled: `grammar.grammars.Compiled`; None: not compiled in this process.
    """

    source: str
    begins_after: str | None = None
    compiled: object = field(default=None, compare=False, repr=False)

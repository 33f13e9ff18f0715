"""Regular expressions whose meaning depends on who reads them: those are refused.

They are compiled by Rust's rules (https://docs.rs/regex/latest/regex/#syntax). JSON Schema names ECMA-262, and most
who send them think of Python's `re`. What these have in addition (lookarounds, backreferences, word boundaries) is an
error of the compiler's; here is what all accept, each in a way of its own.
"""

from __future__ import annotations

import re
from typing import Final

#: An escape that goes on in braces.
_BRACED: Final = re.compile(r"\\[pPxuU]\{[^}]*\}")


def check_dialect(pattern: str) -> None:
    r"""Refuses what Rust reads as something else than ECMA-262 and Python do.

    Raises:
        ValueError: set operations within a class (``[a&&b]``, ``[[a]b]``), or possessive quantifiers (``a++``).
    """
    in_class, place, last = False, 0, ""
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place = pattern.find("}", place) + 1 if _BRACED.match(pattern, place) else place + 2
            last = ""
            continue
        if in_class:
            if char == "[":
                raise ValueError(r"a bracket within a class has no one meaning; write \[")
            if pattern[place : place + 2] in ("&&", "--", "~~"):
                raise ValueError(f"{char * 2} within a class has no one meaning; write \\{char}")
            in_class = char != "]"
        elif char == "[":
            in_class = True
            place += 2 if pattern.startswith("[^", place) else 1
            place += pattern.startswith("]", place)  # a bracket that comes first is one of the class
            last = ""
            continue
        elif char == "+" and last in ("+", "*", "?", "}"):
            raise ValueError("possessive quantifiers are not supported; write a group around what is repeated")
        last = char
        place += 1

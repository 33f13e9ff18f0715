r"""Dialects of regular expressions: converts constructs whose meaning differs between them.

llguidance compiles Rust's dialect (https://docs.rs/regex/latest/regex/#syntax). JSON Schema specifies ECMA-262, and
most users write Python's. llguidance rejects lookarounds, backreferences and word boundaries. This module handles
constructs that all dialects accept with different meanings: classes such as `\d` become ASCII's, as in ECMA-262 (`\s`:
what is white space in every dialect), unless ``(?u)`` selects Unicode's; ambiguous constructs are rejected.
"""

from __future__ import annotations

import re
from typing import Final

#: An escape with an argument in braces.
_BRACED: Final = re.compile(r"\\[pPxuU]\{[^}]*\}")

#: Flags that select Unicode's classes.
_UNICODE: Final = re.compile(r"\(\?[a-zA-Z]*u[a-zA-Z-]*[:)]")

#: Characters that are white space in all dialects, and those that are white space in at least one.
_SPACES: Final = r"\t\n\x0B\f\r\x20"
_ALL_SPACES: Final = rf"{_SPACES}\x1C-\x1F\x85\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"

#: Classes that match Unicode in Rust → replacement within brackets. ``\s`` matches what is white space in every
#: dialect.
_CLASSES: Final = {
    "d": "0-9",
    "D": "[^0-9]",
    "w": "0-9A-Za-z_",
    "W": "[^0-9A-Za-z_]",
    "s": _SPACES,
    "S": f"[^{_ALL_SPACES}]",
}
#: Their replacement within negated brackets: ``[^\s]`` excludes what is white space in any dialect, and ``[^\S]``
#: matches only what is white space in every dialect.
_NEGATED: Final = _CLASSES | {"s": _ALL_SPACES, "S": f"[^{_SPACES}]"}


def in_dialect(pattern: str) -> str:
    r"""Return `pattern` in Rust's dialect, with classes as described above.

    Raises:
        ValueError: the pattern has set operations within a class (``[a&&b]``, ``[[a]b]``), or possessive quantifiers
            (``a++``).
    """
    is_ascii, is_negated = not _UNICODE.search(pattern), False
    in_class, index, last, parts, done = False, 0, "", list[str](), 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            if is_ascii and pattern[index + 1 : index + 2] in _CLASSES:
                content = (_NEGATED if in_class and is_negated else _CLASSES)[pattern[index + 1]]
                begin, end = index, index + 2
                if not in_class:
                    content = content if content.startswith("[") else f"[{content}]"
                else:  # a class cannot be the end of a range, so a hyphen beside it is literal
                    begin, content = (begin - 1, rf"\-{content}") if last == "-" else (begin, content)
                    if pattern[end : end + 1] == "-" and pattern[end + 1 : end + 2] != "-":
                        end, content = end + 1, rf"{content}\-"
                parts += [pattern[done:begin], content]
                done = index = end
                last = ""
                continue
            index = pattern.find("}", index) + 1 if _BRACED.match(pattern, index) else index + 2
            last = ""
            continue
        if in_class:
            if char == "[":
                raise ValueError(r"a bracket within a class is ambiguous; write \[")
            if pattern[index : index + 2] in ("&&", "--", "~~"):
                raise ValueError(f"{char * 2} within a class is ambiguous; write \\{char}")
            in_class = char != "]"
        elif char == "[":
            in_class, is_negated = True, pattern.startswith("[^", index)
            index += 2 if is_negated else 1
            index += pattern.startswith("]", index)  # a leading bracket is a literal of the class
            last = ""
            continue
        elif char == "+" and last in ("+", "*", "?", "}"):
            raise ValueError("possessive quantifiers are not supported; to nest quantifiers, use a group")
        last = char
        index += 1
    return "".join((*parts, pattern[done:]))

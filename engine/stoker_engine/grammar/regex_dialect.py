r"""Regular expressions, whose meaning depends on who reads them.

They are compiled by Rust's rules (https://docs.rs/regex/latest/regex/#syntax). JSON Schema names ECMA-262, and most
who send them think of Python's `re`. What these have in addition (lookarounds, backreferences, word boundaries) is an
error of the compiler's; here is what all accept, each in a way of its own. Classes such as `\d` become ECMA-262's,
which are ASCII's, unless ``(?u)`` asks for Unicode's; what nobody can know is refused.
"""

from __future__ import annotations

import re
from typing import Final

#: An escape that goes on in braces.
_BRACED: Final = re.compile(r"\\[pPxuU]\{[^}]*\}")

#: Flags that ask for Unicode's classes.
_UNICODE: Final = re.compile(r"\(\?[a-zA-Z]*u[a-zA-Z-]*[:)]")

#: White space to all, and white space to anybody: ECMA-262 has more of it than ASCII, and not what Unicode has.
_SPACES: Final = r"\t\n\x0B\f\r\x20"
_ALL_SPACES: Final = rf"{_SPACES}\x1C-\x1F\x85\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"

#: Classes that Rust takes for Unicode's: what stands for them within brackets. Of white space it is what all agree on.
_CLASSES: Final = {
    "d": "0-9",
    "D": "[^0-9]",
    "w": "0-9A-Za-z_",
    "W": "[^0-9A-Za-z_]",
    "s": _SPACES,
    "S": f"[^{_ALL_SPACES}]",
}
#: The same within brackets that are negated.
_NEGATED: Final = _CLASSES | {"s": _ALL_SPACES, "S": f"[^{_SPACES}]"}


def in_dialect(pattern: str) -> str:
    r"""`pattern` as Rust must read it to mean what it means by ECMA-262.

    Raises:
        ValueError: set operations within a class (``[a&&b]``, ``[[a]b]``), or possessive quantifiers (``a++``).
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
                else:  # it begins and ends no range: a hyphen beside it is one
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
                raise ValueError(r"a bracket within a class has no one meaning; write \[")
            if pattern[index : index + 2] in ("&&", "--", "~~"):
                raise ValueError(f"{char * 2} within a class has no one meaning; write \\{char}")
            in_class = char != "]"
        elif char == "[":
            in_class, is_negated = True, pattern.startswith("[^", index)
            index += 2 if is_negated else 1
            index += pattern.startswith("]", index)  # a bracket that comes first is one of the class
            last = ""
            continue
        elif char == "+" and last in ("+", "*", "?", "}"):
            raise ValueError("possessive quantifiers are not supported; write a group around what is repeated")
        last = char
        index += 1
    return "".join((*parts, pattern[done:]))

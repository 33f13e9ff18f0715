"""Parser of the text fields of a form (``multipart/form-data``), which skips files and long fields.

It rejects forms whose model two servers might read differently, because authorization depends on the model.
"""

from __future__ import annotations

import re
from typing import Final

from stoker_common.errors import RequestError

#: Maximum number of parts in a form, of bytes in a part's headers, and of bytes in a text field that is read.
_MAX_PARTS: Final = 64
_MAX_HEAD: Final = 4096
_MAX_TEXT: Final = 64 * 1024

_BOUNDARY: Final = re.compile(r'[;\s]boundary=("?)([!#-:<-~]{1,70})\1\s*(?:;|$)', re.I)
_NAME: Final = re.compile(rb'[\s;]name="([^"\\]*)"', re.I)
_FILE: Final = re.compile(rb"[\s;]filename=", re.I)


def is_form(content_type: str) -> bool:
    """Whether a body with this Content-Type is a form."""
    return content_type.strip().lower().startswith("multipart/form-data")


def text_fields(body: bytes, content_type: str) -> dict[str, str]:
    """Return the text fields of a form, without long ones.

    Raises:
        RequestError: the form is malformed or ambiguous.
    """
    found = _BOUNDARY.search(content_type)
    if found is None or content_type.lower().count("boundary") != 1:
        raise RequestError("the form's Content-Type must have exactly one boundary")
    line = b"--" + found[2].encode()
    if not body.startswith(line):
        raise RequestError("the form does not begin with its boundary")
    fields, at = dict[str, str](), len(line)
    for count in range(_MAX_PARTS + 1):
        if body.startswith(b"--", at):
            return fields
        if count == _MAX_PARTS:
            break
        start = body.find(b"\r\n\r\n", at, at + _MAX_HEAD)
        end = body.find(b"\r\n" + line, start)
        if start < 0 or end < 0:
            raise RequestError("the form is truncated, or the headers of a part are missing or too long")
        head = body[at : start + 2]
        at = end + len(line) + 2
        names = _NAME.findall(head)
        if len(names) != 1 or b"*=" in head or head.lower().count(b"content-disposition") != 1:
            raise RequestError("each part of the form must have exactly one name")
        if _FILE.search(head):
            continue
        name = names[0].decode("utf-8", "replace")
        if name in fields and name == "model":
            raise RequestError("the form has more than one field 'model'", "model", "invalid_value")
        if end - start > _MAX_TEXT:
            continue
        fields[name] = body[start + 4 : end].decode("utf-8", "replace")
    raise RequestError(f"the form has more than {_MAX_PARTS} parts")

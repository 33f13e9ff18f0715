"""Decides whether an object must be applied. Pure.

    apply  ⇔  live lacks a desired value   ∨   live has a field that the operator owns and no longer desires

For the first, the desired object is compared with the live one, ignoring fields that others added outside of `_EXACT`.
For the second, ``managedFields`` of the live object lists the fields that each manager applied last. So the operator
keeps no record of its own, and the comparison works across restarts and releases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker_operator.api.quantity import amount

#: Fields that identify an item of a list that Kubernetes merges by item. A volume may be mounted twice, so mountPath
#: comes before name.
_ITEM_KEYS: Final = ("mountPath", "name", "uid")
#: Values that the API server may omit: an absent field means the same.
_ZERO: Final[tuple[object, ...]] = ("", 0, False, None, [], {})
#: By kind, the parts that must be equal, because an additional field changes their meaning: a rule without `from`
#: allows all traffic. The API server adds no defaults to these parts as they are rendered.
_EXACT: Final[Mapping[str, tuple[str, ...]]] = {
    "NetworkPolicy": ("spec",),
    "Role": ("rules",),
    "RoleBinding": ("roleRef", "subjects"),
}
#: Fields with quantities, which the API server normalizes: 1000m becomes 1.
AMOUNTS: Final = ("limits", "requests", "sizeLimit")


def differs(desired: Mapping[str, Any], live: Mapping[str, Any], manager: str) -> bool:
    """Return whether `desired` must be applied to `live`."""
    if any(live.get(part) != desired[part] for part in _EXACT.get(desired.get("kind", ""), ())):
        return True
    return not _contains(live, desired) or _is_stale(_owned(live, manager), desired)


def owned_part(live: Mapping[str, Any], manager: str) -> Mapping[str, Any]:
    """Return the part of `live` that `manager` applied; empty if it applied nothing."""
    owned = _owned(live, manager)
    part: Mapping[str, Any] = _part(live, owned) if owned else {}
    return part


def _part(live: Any, owned: Mapping[str, Any]) -> Any:
    below = {notation: inner for notation, inner in owned.items() if notation != "."}
    if not below:
        return live
    if isinstance(live, list):
        items = [(json.loads(notation[2:]), inner) for notation, inner in below.items()]
        return [
            keys | _part(item, inner)  # keys identify the item, whichever manager set them
            for item in live
            for keys, inner in items
            if isinstance(item, Mapping) and all(item.get(key) == value for key, value in keys.items())
        ]
    names = ((notation[2:], inner) for notation, inner in below.items())
    return {name: _part(live[name], inner) for name, inner in names if name in live}


def _contains(live: Any, desired: Any, amount: bool = False) -> bool:
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            _contains(live[key], value, amount or key in AMOUNTS) if key in live else value in _ZERO
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        return isinstance(live, list) and _contains_items(live, desired)
    if amount:
        return bool(_amount(live) == _amount(desired))
    return bool(live == desired)


def _contains_items(live: Sequence[Any], desired: Sequence[Any]) -> bool:
    if not desired:
        return True  # live items belong to other managers, or `_is_stale` finds them
    key = next((key for key in _ITEM_KEYS if all(isinstance(item, Mapping) and key in item for item in desired)), None)
    if key is None:
        return len(live) == len(desired) and all(map(_contains, live, desired))
    live_items = {item.get(key): item for item in live}
    return all(item[key] in live_items and _contains(live_items[item[key]], item) for item in desired)


def _owned(live: Mapping[str, Any], manager: str) -> Mapping[str, Any]:
    """Return the fields that `manager` applied last, in the notation of ``fieldsV1``."""
    for entry in live["metadata"].get("managedFields", ()):
        if (entry["manager"], entry["operation"], entry.get("subresource", "")) == (manager, "Apply", ""):
            fields: Mapping[str, Any] = entry["fieldsV1"]
            return fields
    return {}


def _is_stale(owned: Mapping[str, Any], desired: Any) -> bool:
    """Return whether an owned field is not in `desired`.

    In ``fieldsV1``, a field is ``f:NAME``, an item of a list ``k:{its keys}``, a value of a set ``v:VALUE``, and ``.``
    is the parent itself.
    """
    for notation, below in owned.items():
        mark, _, name = notation.partition(":")
        if mark == "f":
            if not isinstance(desired, Mapping) or name not in desired:
                return True
            inner = desired[name]
        elif mark == "k":
            keys = json.loads(name).items()
            inner = next((item for item in desired if all(item.get(key) == value for key, value in keys)), None)
            if inner is None:
                return True
        elif mark == "v":
            if json.loads(name) not in desired:
                return True
            continue
        else:
            continue
        if _is_stale(below, inner):
            return True
    return False


def _amount(value: Any) -> Any:
    """Return the amount of a quantity such as ``500m``; return other values unchanged."""
    try:
        return amount(value if isinstance(value, int) else str(value))
    except ValueError:
        return value

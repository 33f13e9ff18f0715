"""The names that a ``quantization_config`` speaks of are those that the loader finds in files."""

from __future__ import annotations

import re

import pytest

from stoker_engine.architectures.module_names import module_name
from stoker_engine.models.families.registry import FAMILIES

_SLOTS = (
    "embed", "lm_head", *(f"layers.3.{part}" for part in ("q", "k", "v", "o", "gate", "up", "down")),
    *(f"layers.3.experts.7.{part}" for part in ("gate", "up", "down")),
    *(f"layers.3.shared.{part}" for part in ("gate", "up", "down")),
    *(f"layers.3.{part}" for part in ("q_a", "q_b", "kv_a")),
)  # fmt: skip


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_modules_have_the_names_that_are_loaded(architecture: str) -> None:
    spelling = FAMILIES[architecture]
    names = dict(spelling.names)
    for theirs, fused in spelling.fused.items():
        if not callable(fused.parts):
            names |= dict.fromkeys(fused.parts, theirs)
    known = 0
    for slot in _SLOTS:
        general = re.sub(r"experts\.7", "experts.{j}", slot.replace("layers.3", "layers.{i}"))
        if general in names:
            theirs = names[general].replace("{i}", "3").replace("{j}", "7")
            assert spelling.canonical(module_name(architecture, slot)) == theirs
            known += 1
    assert known >= 5

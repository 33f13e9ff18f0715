"""Patterns of module names have the meaning of `re`, and none takes long."""

from __future__ import annotations

import random
import re
from contextlib import suppress

import pytest

from stoker_common.errors import ModelError
from stoker_engine.architectures.quantization.listed_modules import ListedModules
from stoker_engine.architectures.quantization.name_patterns import NamePatterns

from ...support.work import work

#: Patterns of checkpoints: llm-compressor's ignore lists and targets, GPTQModel's and AutoRound's ``dynamic``.
_REAL = [
    "lm_head", ".*lm_head", "lm_head.*", ".*mlp.gate$", ".*mlp\\.gate$", ".*shared_expert_gate$", ".*self_attn.*",
    ".*block_sparse_moe.gate", ".*router$", ".*embed_tokens$", "visual.*", "model.visual.*", ".*mtp\\..*",
    "model\\.layers\\.(0|1|2)\\..*", "model.layers.\\d+$", "model\\.layers\\.\\d+\\.mlp\\..*", "^mtp\\..*",
    ".*\\.18\\..*gate.*", ".*down.*", ".*\\.(?:1[0-5])\\..*", ".*\\.(?:1[6-9]|20|21)\\..*", ".*\\.1\\..*attn.*",
    "^model\\.layers\\.0\\.mlp\\.up_proj$", ".*\\.mlp\\.experts\\.[0-9]+\\.(gate_proj|up_proj|down_proj)$",
    ".*self_attn\\.(q|k|v|o)_proj$", ".*layers\\.[0-9]\\..*", ".*?mlp.*?", ".*(up|down)_?(proj)?",
    ".*gate$|.*router$",
]  # fmt: skip
_NAMES = [
    "lm_head", "model.lm_head", "model.embed_tokens", "model.visual.blocks.1.attn", "visual.merger", "mtp.fc", "",
    "model.layers.1", "model.layers.18.mlp.gate", "model.layers.20.block_sparse_moe.gate", "model.layers.3.router",
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 1, 2, 10, 15, 16, 18, 21)
        for part in (
            "self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            "mlp.experts.127.gate_proj", "mlp.shared_expert_gate", "mlp.updown",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("expression", _REAL)
def test_patterns_of_checkpoints_match_as_re_does(expression: str) -> None:
    one, meant = NamePatterns([expression]), re.compile(expression)
    assert [one.first(name) is not None for name in _NAMES] == [meant.match(name) is not None for name in _NAMES]


def test_random_patterns_match_as_re_does() -> None:
    draw = random.Random(0)
    atoms = ["a", "b", ".", "\\.", "\\d", "[ab]", "[^b]", "[0-2]", "(a|b)", "(?:ab|a|1)", "(b.*|a)", "(aa|.)?", "(|a+)"]
    computed = 0
    for _ in range(2000):
        parts = [draw.choice(atoms) for _ in range(draw.randrange(6))]
        parts = [part + draw.choice(["", "", "*", "+", "?", "*?"]) * (part[0] != "(") for part in parts]
        expression = draw.choice(["", "^"]) + "".join(parts) + draw.choice(["", "$"])
        others = ["b" * 9 + "$", expression, ".*"]
        one, all_of_them, meant = NamePatterns([expression]), NamePatterns(others), re.compile(expression)
        for _ in range(10):
            name = "".join(draw.choice("ab.12") for _ in range(draw.randrange(9)))
            computed += (matches := meant.match(name) is not None)
            assert one.first(name) == (0 if matches else None), (expression, name)
            assert all_of_them.first(name) == (1 if matches else 2), (expression, name)
    assert 2000 < computed < 18_000


@pytest.mark.parametrize(
    "expression",
    [
        ".?" * 3000,
        ".*" * 3000,
        "a?" * 1500 + "a" * 1500,
        "(a|a)" * 12 + "$",
        ".*" * 1000 + "b$",
        ".*a.?.?.?.?.?.?.?.?.?b",
    ],
)
def test_matching_takes_bounded_work(expression: str) -> None:
    names = [f"{'a' * 100}.{number}" for number in range(100)]

    def match() -> None:
        with suppress(ValueError):
            patterns = NamePatterns([expression])
            for name in names:
                patterns.first(name)

    assert work(match) < 1_000_000  # `re` would take years


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+", "((a))", "(a", "a)", "a{2,}", "^(?!x).*", "a\\b", "\\w+", "(?P<a>b)", "(?i)a", "a**", "a*+", "[z-a]",
        "[]", "*", "a$b", "(a$|b)", "\\", "[a", "(0|1)" * 20, "a" * 10_000,
    ],
)  # fmt: skip
def test_unsupported_patterns_are_refused(expression: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json: ignore holds .*, a pattern that is not supported"):
        ListedModules.of(["lm_head", f"re:{expression}"], "ignore")


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(ModelError, match="or too many patterns"):
        ListedModules.of((f"re:.*{number}" for number in range(5000)), "ignore")


def test_names_and_patterns_have_the_index_of_their_first_match() -> None:
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(20_000)]  # one for each layer
    listed = ListedModules.of([*names, "re:.*up$", "lm_head", "model.*.down", "re:.*experts.*", "router", "router"], "")
    indexes = {
        "model.layers.7.mlp.gate": 7, "language.model.layers.7.mlp.gate.proj": 7, "model.layers.7.mlp.gate_proj": None,
        "a.up": 20_000, "a.lm_head": 20_001, "lm_head2": None, "x.model.3.down": 20_002, "down": None,
        "experts.router": 20_003, "router": 20_004, "a" * 3000: None, ".".join("a" * 3000): None,
    }  # fmt: skip
    assert {module: listed.first(module) for module in indexes} == indexes

"""PEFT's ``adapter_config.json``: which modules an adapter changes, by matrices of which ranks, scaled by what.

Every field of PEFT's `LoraConfig` is honoured, without effect on a trained adapter, or refused.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import regex

from stoker_common.errors import AdapterError

FILE: Final = "adapter_config.json"

#: More than any model's matrices have; what is served is --max-lora-rank's.
_MAX_RANK: Final = 10**9
#: Seconds that all patterns of an adapter may take together: they may be hostile.
_PATTERNS_S: Final = 2.0
#: Of one pattern: nothing interrupts its compilation, which writes counted repeats out.
_MAX_PATTERN_CHARACTERS: Final = 8 << 10
_MAX_REPEATS: Final = 1000
_COUNTED = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")

#: Fields that may be anything: they describe how an adapter was trained, or what with.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "lora_dropout",
        "lora_ga_config", "loftq_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "task_type",
    }
)  # fmt: skip

_Number = TypeVar("_Number", int, float)

_HONOURED: Final = frozenset(
    {
        "alpha_pattern", "exclude_modules", "fan_in_fan_out", "layers_pattern", "layers_to_transform", "lora_alpha",
        "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
    }
)  # fmt: skip

#: Fields that must be empty, and why.
_REFUSED: Final = {
    "alora_invocation_tokens": "an activated adapter (aLoRA) changes only what follows its invocation tokens",
    "arrow_config": "Arrow routes tokens among adapters",
    "ensure_weight_tying": "the embedding and the head would share an adapter",
    "kasa_config": "KaSA changes the model's own matrices",
    "layer_replication": "the model would have other layers",
    "lora_bias": "B has a bias",
    "megatron_config": "its matrices are Megatron's",
    "modules_to_save": "it has whole modules of its own; merge it into the model",
    "monteclora_config": "its matrices are drawn at random",
    "trainable_token_indices": "it has vectors of tokens of its own; merge it into the model",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "DoRA scales the model's own matrices; merge it into the model",
    "use_qalora": "QALoRA pools what A gets",
    "velora_config": "VeLoRA projects what A gets",
}

#: Ways to begin that take what A and B hold from the model's own matrices.
_CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _Patterns:
    """An adapter's patterns, which have a limited time together."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}
        self._left_s = _PATTERNS_S

    def match(self, pattern: str, name: str, whole: bool = False) -> Any:
        """What a pattern finds at the beginning of a name, or as all of it; None: nothing.

        Raises:
            AdapterError: the pattern cannot be read, or the patterns take too long.
        """
        started = time.monotonic()
        try:
            if pattern not in self._read:
                self._read[pattern] = _compiled(pattern)
            if self._left_s <= 0:
                raise TimeoutError
            read = self._read[pattern]
            return (read.fullmatch if whole else read.match)(name, timeout=self._left_s)
        except TimeoutError:
            raise AdapterError(
                f"{FILE}: its patterns take too long to match, at {_shown(pattern)}; write simpler ones"
            ) from None
        except (re.error, regex.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise AdapterError(f"{FILE}: {_shown(pattern)} is no pattern: {error}") from None
        finally:
            self._left_s -= time.monotonic() - started


@dataclass(frozen=True)
class AdapterConfig:
    """What is honoured of an adapter's config; see PEFT's `LoraConfig`.

    Attributes:
        target_modules: the last parts of names, or a pattern of whole names.
        layers_to_transform: None: all.
    """

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    _patterns: _Patterns = field(default_factory=_Patterns, repr=False, compare=False)

    @classmethod
    def parse(cls, content: bytes) -> AdapterConfig:
        """Reads the file's content.

        Raises:
            AdapterError: it is no such config, or asks for what is not computed here.
        """
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{FILE} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise AdapterError(f"{FILE} holds no object")
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"{FILE}: peft_type is {_shown(fields.get('peft_type'))}; only LORA adapters are served")
        _refuse(fields)
        _flag(fields, "fan_in_fan_out")  # of the model's matrices: A and B are the same either way
        layers = fields.get("layers_to_transform")
        return cls(
            r=_positive("r", fields.get("r", 8)),
            lora_alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
            rank_pattern={key: _positive("rank_pattern", n) for key, n in _object(fields, "rank_pattern")},
            alpha_pattern={key: _number("alpha_pattern", n) for key, n in _object(fields, "alpha_pattern")},
            use_rslora=_flag(fields, "use_rslora"),
            target_modules=_names(fields, "target_modules"),
            exclude_modules=_names(fields, "exclude_modules"),
            target_parameters=_list(fields, "target_parameters"),
            layers_to_transform=None if layers in (None, []) else _layers(layers),
            layers_pattern=_list(fields, "layers_pattern"),
        )

    @property
    def key(self) -> str:
        """A text that is equal for configs of equal effect. PEFT writes lists of modules in arbitrary order."""
        values = {name: value for name, value in vars(self).items() if name != "_patterns"}
        for name in ("target_modules", "exclude_modules", "target_parameters"):  # layers_pattern is tried in order
            if isinstance(values[name], tuple):
                values[name] = sorted(values[name])
        return repr(values)

    @property
    def targets_all_linear(self) -> bool:
        """Whether all linear modules but the head are targets."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def targets(self, module: str) -> bool:
        """Whether the module of this name is to be changed.

        Raises:
            AdapterError: a pattern cannot be read, or takes too long.
        """
        if self.excludes(module):
            return False
        if self.targets_all_linear:
            return True
        if isinstance(self.target_modules, str):
            return self._is_named(module, self.target_modules)
        if module in self.target_modules:  # a whole name stands for itself, whatever its layer
            return True
        return self._is_named(module, self.target_modules) and self._is_in_layers(module)

    def excludes(self, module: str) -> bool:
        """Whether the module of this name stays as it is, whatever else is said."""
        return self._is_named(module, self.exclude_modules)

    def is_target_parameter(self, name: str) -> bool:
        """Whether the parameter of this name is to be changed."""
        return any(name == each or name.endswith(f".{each}") for each in self.target_parameters)

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """The rank of the matrices of a module or parameter, and what their product is multiplied by."""
        rank = self._of_pattern(self.rank_pattern, name, self.r)
        alpha = self._of_pattern(self.alpha_pattern, name, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        # The first number is the layer's; a later one may be an expert's.
        number = r"\.(?P<idx>[0-9]+)\."
        patterns = [rf"(?:^|.*?\.){each}{number}" for each in self.layers_pattern] or [rf".*?\.[^.]*{number}"]
        for pattern in patterns:
            found = self._patterns.match(pattern, module)
            if found is not None:
                index = found["idx"]
                return index is not None and index.isdecimal() and int(index[:9]) in self.layers_to_transform
        return False

    def _is_named(self, module: str, names: tuple[str, ...] | str) -> bool:
        """As PEFT has it: a pattern of the whole name, or names or ends of names."""
        if not names:
            return False
        if isinstance(names, str):
            return self._patterns.match(names, module, whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _of_pattern(self, values: Mapping[str, _Number], name: str, otherwise: _Number) -> _Number:
        """The value of the first pattern that the name or its end matches."""
        for pattern, value in values.items():
            if self._patterns.match(rf"(.*\.)?({pattern})$", name):
                return value
        return values.get(name, otherwise)


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or value in (None, False, "", [], {}):
            continue
        if name in _REFUSED:
            raise AdapterError(f"{FILE}: {name} is not served: {_REFUSED[name]}")
        if name == "bias":
            if value != "none":
                raise AdapterError(
                    f"{FILE}: bias is {_shown(value)}, and biases of the model stay; merge it into the model"
                )
        elif name == "init_lora_weights":
            if isinstance(value, str) and value.lower().startswith(_CHANGES_MODEL):
                raise AdapterError(
                    f"{FILE}: init_lora_weights is {_shown(value)}, which changes the model's own matrices; save the "
                    "adapter again with path_initial_model_for_weight_conversion"
                )
        else:
            raise AdapterError(f"{FILE}: {_shown(name)} is not known here, and may change what the adapter computes")


def _compiled(pattern: str) -> Any:
    """A pattern that also `re` knows, which PEFT matches with, and whose compilation takes little memory and time."""
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ValueError(f"it has more than {_MAX_PATTERN_CHARACTERS} characters")
    if "{" in _COUNTED.sub("", pattern):
        raise ValueError("braces may only hold counts")
    counts = [max(int(count or 1) for count in found.groups("1")) for found in _COUNTED.finditer(pattern)]
    if math.prod(max(1, count) for count in counts) > _MAX_REPEATS:
        raise ValueError(f"its counted repeats multiply to more than {_MAX_REPEATS}")
    re.compile(pattern)
    return regex.compile(pattern)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{FILE}: {name} must be whole numbers from 1 to {_MAX_RANK}, not {_shown(value)}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{FILE}: {name} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterError(f"{FILE}: {name} must be a finite number, not {_shown(value)}")
    return number


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{FILE}: {name} must be true or false, not {_shown(value)}")
    return bool(value)


def _object(fields: Mapping[str, Any], name: str) -> Collection[tuple[str, object]]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise AdapterError(f"{FILE}: {name} must be an object, not {_shown(value)}")
    return tuple(value.items())


def _names(fields: Mapping[str, Any], name: str) -> tuple[str, ...] | str:
    value = fields.get(name)
    return value if isinstance(value, str) else _list(fields, name)


def _list(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise AdapterError(f"{FILE}: {name} must be a list of names, not {_shown(value)}")
    return tuple(dict.fromkeys(value))


def _layers(value: object) -> frozenset[int]:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise AdapterError(f"{FILE}: layers_to_transform must be numbers of layers, not {_shown(value)}")
    return frozenset(numbers)


def _shown(value: object) -> str:
    """A value of the file, for a message: not all of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""PEFT's ``adapter_config.json``: the modules that an adapter changes, and the ranks and scales of its matrices.

Every field of PEFT's `LoraConfig` is applied, or ignored because it does not affect a trained adapter; values with
other effects are refused.
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

#: Limit of the ranks in a file; --max-lora-rank is checked later.
_MAX_RANK: Final = 10**9
#: Limit of the total time for compiling and matching all patterns of an adapter, in seconds. Patterns may be malicious.
_PATTERNS_S: Final = 2.0
#: Limits of one pattern. Its compilation, which expands counted repeats, cannot be interrupted.
_MAX_PATTERN_CHARACTERS: Final = 8 << 10
_MAX_REPEATS: Final = 1000
_COUNTED = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")

#: Fields that may have any value, because they do not affect how a trained adapter is applied.
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

#: Fields that are refused unless they are empty or false → reason.
_REFUSED: Final = {
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies only from its invocation tokens on",
    "arrow_config": "Arrow routes tokens among adapters",
    "ensure_weight_tying": "the embedding and the head would share an adapter",
    "kasa_config": "KaSA truncates the model's weights",
    "layer_replication": "it changes the model's layers",
    "lora_bias": "B has a bias",
    "megatron_config": "its layers are Megatron's",
    "modules_to_save": "the adapter replaces whole modules; merge it into the model",
    "monteclora_config": "MonteCLoRA samples perturbations of A",
    "trainable_token_indices": "the adapter replaces embeddings of tokens; merge it into the model",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "DoRA rescales the model's weights; merge the adapter into the model",
    "use_qalora": "QALoRA pools the input of A",
    "velora_config": "VeLoRA compresses the input of A in training",
}

#: Prefixes of initialization methods that also change the model's weights.
_CHANGES_MODEL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _Patterns:
    """The regular expressions of an adapter, with a time limit for all of them together."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}
        self._left_s = _PATTERNS_S

    def match(self, pattern: str, name: str, whole: bool = False) -> Any:
        """Return the match of a pattern at the beginning of a name, or None.

        Args:
            whole: whether the pattern must match the whole name.

        Raises:
            AdapterError: the pattern is invalid, or the time limit is exceeded.
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
                f"{FILE}: its patterns take too long to match (at {_shown(pattern)}); simplify them"
            ) from None
        except (re.error, regex.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise AdapterError(f"{FILE}: {_shown(pattern)} is not a valid pattern: {error}") from None
        finally:
            self._left_s -= time.monotonic() - started


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of an adapter's config that are applied; see PEFT's `LoraConfig`.

    Attributes:
        target_modules: whole names of modules or their last components; or a pattern of whole names; or "all-linear".
        exclude_modules: like `target_modules`; takes precedence over it.
        layers_to_transform: layer indices; None: all layers.
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
        """Parse the file's content.

        Raises:
            AdapterError: the content is invalid, or has a field that is not supported.
        """
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{FILE} is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise AdapterError(f"{FILE} must contain a JSON object")
        if fields.get("peft_type") != "LORA":
            raise AdapterError(f"{FILE}: peft_type is {_shown(fields.get('peft_type'))}; only LORA is supported")
        _refuse(fields)
        _flag(fields, "fan_in_fan_out")  # describes the layout of the model's weights; A and B do not depend on it
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
        """String that is equal for configs that differ only in the order of module and parameter names in their lists,
        because PEFT writes these in arbitrary order."""
        values = {name: value for name, value in vars(self).items() if name != "_patterns"}
        for name in ("target_modules", "exclude_modules", "target_parameters"):  # layers_pattern is tried in order
            if isinstance(values[name], tuple):
                values[name] = sorted(values[name])
        return repr(values)

    @property
    def targets_all_linear(self) -> bool:
        """Whether `target_modules` is "all-linear"; PEFT then adapts all linear modules except the head."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def targets(self, module: str) -> bool:
        """Whether the config names this module as a target.

        Raises:
            AdapterError: a pattern is invalid, or the time limit is exceeded.
        """
        if self.excludes(module):
            return False
        if self.targets_all_linear:
            return True
        if isinstance(self.target_modules, str):
            return self._is_named(module, self.target_modules)
        if module in self.target_modules:  # layers_to_transform does not apply to whole names
            return True
        return self._is_named(module, self.target_modules) and self._is_in_layers(module)

    def excludes(self, module: str) -> bool:
        """Whether `exclude_modules` contains the module of this name."""
        return self._is_named(module, self.exclude_modules)

    def is_target_parameter(self, name: str) -> bool:
        """Whether `target_parameters` contains the parameter, by its whole name or its last components."""
        return any(name == each or name.endswith(f".{each}") for each in self.target_parameters)

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Return the rank of a module's or parameter's matrices, and the scale of their product."""
        rank = self._of_pattern(self.rank_pattern, name, self.r)
        alpha = self._of_pattern(self.alpha_pattern, name, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        # The first number is the layer index; a later one may be an expert's index.
        number = r"\.(?P<idx>[0-9]+)\."
        patterns = [rf"(?:^|.*?\.){each}{number}" for each in self.layers_pattern] or [rf".*?\.[^.]*{number}"]
        for pattern in patterns:
            found = self._patterns.match(pattern, module)
            if found is not None:
                index = found["idx"]
                return index is not None and index.isdecimal() and int(index[:9]) in self.layers_to_transform
        return False

    def _is_named(self, module: str, names: tuple[str, ...] | str) -> bool:
        """Whether `names` contains a module, by PEFT's rules: names or their last components, or a pattern of names."""
        if not names:
            return False
        if isinstance(names, str):
            return self._patterns.match(names, module, whole=True) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _of_pattern(self, values: Mapping[str, _Number], name: str, otherwise: _Number) -> _Number:
        """Return the value of the first pattern that matches the name or its last components; if none does, the value
        of the key that equals the name, or else `otherwise`."""
        for pattern, value in values.items():
            if self._patterns.match(rf"(.*\.)?({pattern})$", name):
                return value
        return values.get(name, otherwise)


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or value in (None, False, "", [], {}):
            continue
        if name in _REFUSED:
            raise AdapterError(f"{FILE}: {name} is not supported: {_REFUSED[name]}")
        if name == "bias":
            if value != "none":
                raise AdapterError(
                    f"{FILE}: bias is {_shown(value)}; adapters cannot change biases: merge it into the model"
                )
        elif name == "init_lora_weights":
            if isinstance(value, str) and value.lower().startswith(_CHANGES_MODEL):
                raise AdapterError(
                    f"{FILE}: init_lora_weights is {_shown(value)}, which changes the model's weights; save the "
                    "adapter again with path_initial_model_for_weight_conversion"
                )
        else:
            raise AdapterError(f"{FILE}: {_shown(name)} is not known, and may change the adapter's results")


def _compiled(pattern: str) -> Any:
    """Compile a pattern. It must also be valid for `re`, which PEFT uses.

    Raises:
        ValueError: its compilation could take much memory or time.
        re.error, regex.error: it is invalid.
    """
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ValueError(f"it has more than {_MAX_PATTERN_CHARACTERS} characters")
    if "{" in _COUNTED.sub("", pattern):
        raise ValueError("braces may only contain repeat counts")
    counts = [max(int(count or 1) for count in found.groups("1")) for found in _COUNTED.finditer(pattern)]
    if math.prod(max(1, count) for count in counts) > _MAX_REPEATS:
        raise ValueError(f"the product of its repeat counts is larger than {_MAX_REPEATS}")
    re.compile(pattern)
    return regex.compile(pattern)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{FILE}: {name}: ranks must be integers from 1 to {_MAX_RANK}, not {_shown(value)}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{FILE}: {name}: expected a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise AdapterError(f"{FILE}: {name}: expected a finite number, not {_shown(value)}")
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
        raise AdapterError(f"{FILE}: layers_to_transform must be a layer index or a list of them, not {_shown(value)}")
    return frozenset(numbers)


def _shown(value: object) -> str:
    """Return the truncated repr of a value of the file, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

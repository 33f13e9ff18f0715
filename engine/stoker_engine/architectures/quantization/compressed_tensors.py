"""compressed-tensors, the format of llm-compressor. Each group of modules has its own scheme.

Fields are those of compressed-tensors' ``QuantizationConfig``. If a scheme quantizes activations to e4m3 or symmetric
int8, this is applied on GPUs, for each token or group of its columns; scales stored for activations are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.quantization.listed_modules import ListedModules, class_of
from stoker_engine.architectures.stored_formats import LARGEST_GROUP, Code, GroupFormat, Scale

METHOD: Final = "compressed-tensors"

#: ``format`` of unquantized weights; activations or the KV cache may be quantized.
_DENSE: Final = "dense"

#: Supported values of ``format``, of the whole config and of a group. The tensors determine the
#: actual packing.
_FORMATS: Final = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", _DENSE,
)  # fmt: skip
_AGAIN: Final = "quantize the model again with llm-compressor, to W4A16, W8A16, W8A8 or FP8_DYNAMIC"

#: Number of bits → narrowest code for such integers; others have 8 bits.
_INTEGERS: Final[dict[int, Code]] = {1: "uint2", 2: "uint2", 3: "uint3", 4: "uint4"}
_SCALES: Final[dict[str, Scale]] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Scheme:
    """Storage of the weights of one group of modules.

    Attributes:
        format: format of the matrices.
        bits: bits per element in the file; the code in `format` may have more.
        rows: rows per scale: those of a block, 1, or 0 for all rows of a tensor.
    """

    format: GroupFormat
    bits: int
    rows: int


@dataclass(frozen=True)
class Group:
    """One of ``config_groups``.

    Attributes:
        targets: names, patterns and classes of modules.
        scheme: storage of the modules' weights; None: not quantized.
    """

    targets: tuple[str, ...]
    scheme: Scheme | None


@dataclass(frozen=True)
class Targets:
    """Targets of all groups that are regular expressions, or all other targets.

    Attributes:
        listed: the targets.
        groups: for each target, its group.
    """

    listed: ListedModules
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, groups: tuple[Group, ...], are_patterns: bool) -> Targets:
        """Collect the targets of one kind.

        Raises:
            ModelError: see `ListedModules`.
        """
        pairs = [(name, each) for each in groups for name in each.targets if name.startswith("re:") == are_patterns]
        listed = ListedModules.of((name for name, _ in pairs), "config_groups' targets")
        return cls(listed, tuple(group for _, group in pairs))

    def group_of(self, module: str) -> Group | None:
        """Return the group of the first target that matches the module; None if none does."""
        index = self.listed.first(module)
        return None if index is None else self.groups[index]


@dataclass(frozen=True)
class CompressedTensors:
    """See `QuantizationConfig`.

    Attributes:
        groups: the groups, in the file's order.
        names: targets that are not regular expressions.
        patterns: targets that are regular expressions.
        ignored: modules that are not quantized although a target matches them.
        activations: description of the first scheme that quantizes activations; empty if none does.
    """

    groups: tuple[Group, ...]
    names: Targets
    patterns: Targets
    ignored: ListedModules
    activations: str = ""
    method: str = METHOD

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module; None: not quantized. Names take precedence over patterns, and patterns over
        classes."""
        if self.ignored.mean(module):
            return None
        for targets in (self.names, self.patterns):
            if found := targets.group_of(module):
                return found.scheme
        return next((group.scheme for group in self.groups if class_of(module) in group.targets), None)

    def format_of(self, module: str, outputs: int, inner: int) -> GroupFormat | None:
        """See `QuantizationConfig`."""
        scheme = self.scheme_of(module)
        return None if scheme is None else scheme.format.for_rows(inner)

    def rows_of(self, module: str) -> int:
        """See `QuantizationConfig`."""
        scheme = self.scheme_of(module)
        return 1 if scheme is None else scheme.rows


def parse(config: Mapping[str, Any]) -> CompressedTensors:
    """Read the ``quantization_config`` of a parsed config.json.

    Raises:
        ModelError: unsupported or inconsistent settings.
    """
    given = Fields(config, {}).object("quantization_config")
    fields = Fields(given, {}, file="config.json: quantization_config")
    for name in ("sparsity_config", "transform_config"):
        if _says_something(fields.object(name)):
            raise ModelError(f"config.json: quantization_config has a {name}, which is not supported; {_AGAIN}")
    _check_format(fields, "quantization_config")
    numbers = _SCALES.get(str(Fields(config, {}).get("dtype")).removeprefix("torch."), "bfloat16")
    groups = fields.object("config_groups")
    named = {
        f"config_groups.{name[:100]}": Fields(groups, {}, file="config.json: config_groups").object(name)
        for name in groups
    }
    activations = (_activations(Fields(group, {}, file=f"config.json: {name}")) for name, group in named.items())
    dense = fields.get("format") == _DENSE
    members = tuple(_group(name, group, numbers, dense) for name, group in named.items())
    return CompressedTensors(
        members,
        Targets.of(members, are_patterns=False),
        Targets.of(members, are_patterns=True),
        ListedModules.of(fields.items("ignore", str), "quantization_config's ignore", with_classes=True),
        next(filter(None, activations), ""),
    )


def _says_something(config: Mapping[str, Any]) -> bool:
    """Whether a nested config has any effect."""
    if config.get("format") == _DENSE:
        return False
    return any(value for name, value in config.items() if name != "format" or value)


def _check_format(fields: Fields, where: str) -> None:
    stated = fields.get("format")
    if stated is not None and stated not in _FORMATS:
        raise ModelError(
            f"config.json: {where} has the format {str(stated)[:100]!r}, which is not supported; supported are "
            f"{', '.join(_FORMATS)}; {_AGAIN}"
        )


def _activations(fields: Fields) -> str:
    given = fields.object("input_activations")
    if not given:
        return ""
    inputs = Fields(given, {"num_bits": 8, "type": "int"}, file="config.json: input_activations")
    when = "for each token" if given.get("dynamic") else "by stored scales"
    return f"{inputs.text('type')}{inputs.integer('num_bits')} {when}"


def _group(where: str, group: Mapping[str, Any], numbers: Scale, dense: bool) -> Group:
    """Read one of ``config_groups``.

    Args:
        numbers: see `_scheme`.
        dense: whether the whole checkpoint is unquantized.
    """
    fields = Fields(group, {}, file=f"config.json: {where}")
    _check_format(fields, where)
    given = fields.object("weights")
    is_stored = given and not dense and fields.get("format") != _DENSE
    if not is_stored:
        return Group(tuple(fields.items("targets", str)), None)
    scheme = _scheme(where, given, numbers)
    scheme = replace(scheme, format=replace(scheme.format, quantized_activations=_quantizes_too(fields, scheme)))
    return Group(tuple(fields.items("targets", str)), scheme)


def _quantizes_too(fields: Fields, scheme: Scheme) -> bool:
    """Whether a group's activations are quantized to the type of its weights, in a way that kernels support."""
    stated, format = _activations(fields), scheme.format
    if format.code == "fp8_e4m3":
        return format.scale != "e8m0" and stated.startswith("float8")
    is_symmetric = fields.object("input_activations").get("symmetric") in (None, True)
    return format.code == "int8" and scheme.bits == 8 and not format.zero and stated.startswith("int8") and is_symmetric


def _scheme(where: str, given: Mapping[str, Any], numbers: Scale) -> Scheme:
    """Read the ``weights`` of a group.

    Args:
        numbers: dtype of the scales if the group does not state it.
    """
    weights = Fields(given, {"num_bits": 8, "type": "int", "symmetric": True}, file=f"config.json: {where}.weights")
    bits, kind = weights.integer("num_bits", 1, 8), weights.text("type").lower()
    rows, columns = _shared(weights, where)
    symmetric = weights.flag("symmetric")
    if given.get("dynamic"):
        raise ModelError(f"config.json: {where}.weights must not be dynamic; {_AGAIN}")
    if kind not in ("int", "float") or (kind == "float" and (bits not in (4, 8) or not symmetric)):
        how = "" if symmetric else "asymmetric "
        raise ModelError(f"config.json: {where}.weights are {how}{kind[:20]}{bits}, which is not supported; {_AGAIN}")
    code: Code
    if kind == "float":
        code = "fp4" if bits == 4 else "fp8_e4m3"
        scale, row_scale = _float_scale(weights, bits, columns, numbers)
    else:
        if str(weights.get("strategy")).lower() == "tensor_group":
            raise ModelError(
                f"config.json: {where}.weights are int{bits} with the strategy 'tensor_group', which is not supported; "
                f"{_AGAIN}"
            )
        code = _INTEGERS.get(bits, "int8" if symmetric else "uint8")
        scale, row_scale = _SCALES.get(str(weights.get("scale_dtype")).removeprefix("torch."), numbers), False
    by_groups = weights.get("actorder") in ("group", "dynamic", True)
    format = GroupFormat(
        code, columns, scale, zero=not symmetric, row_scale=row_scale, in_order_of="groups" if by_groups else "columns"
    )
    return Scheme(format, bits, rows)


def _float_scale(weights: Fields, bits: int, group: int, numbers: Scale) -> tuple[Scale, bool]:
    """Return the dtype of the scales of floating-point codes, and whether the tensor has an additional scale."""
    if weights.get("strategy") == "tensor_group":
        return "fp8_e4m3", True
    stated = str(weights.get("scale_dtype")).removeprefix("torch.")
    if stated == "uint8" or (bits == 4 and group == 32 and stated not in _SCALES):
        return "e8m0", False
    return _SCALES.get(stated, numbers), False


def _shared(weights: Fields, where: str) -> tuple[int, int]:
    """Return the number of rows and of columns per scale; 0: all."""
    size = weights.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = usual if weights.get("strategy") is None else weights.text("strategy").lower()
    rows, group = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy in ("group", "tensor_group"):
        group = weights.integer("group_size", 1, LARGEST_GROUP)
    elif strategy == "block":
        shape = weights.items("block_structure", int)
        if len(shape) != 2 or min(shape) < 1 or max(shape) > LARGEST_GROUP:
            raise ModelError(f"config.json: {where}.weights.block_structure must be two sizes, [128, 128] for example")
        rows, group = shape
    elif strategy != "channel":
        raise ModelError(
            f"config.json: {where}.weights have the strategy {strategy!r}, which is not supported; {_AGAIN}"
        )
    if group % 16:
        raise ModelError(
            f"config.json: {where}.weights have one scale for {group} columns, which is not a multiple of "
            "16; quantize the model again with groups or blocks of 32, 64 or 128 columns"
        )
    return rows, group

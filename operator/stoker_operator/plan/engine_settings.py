"""The settings that decide how an engine uses memory: stated ones and the engine's defaults.

A typed field of the spec takes precedence, then an argument in ``spec.engine.args``, then the runtime's default. The
defaults for a step depend on the accelerator (`sizing.batch_limits`); on GPUs they are the same for Stoker's engine
and vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from stoker_engine.contract.argv import flag_name, human_int
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.sizing.batch_limits import default_batch_limits
from stoker_engine.sizing.graph_memory import are_captured
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.workload import Workload

#: Defaults of Stoker's engine. Those that are read for vLLM are the same in vLLM.
_OURS: Final = EngineArgs(model="")
#: Exclusive upper bound of numeric arguments; others are ignored here.
_MAX_VALUE: Final = 10**16


@dataclass(frozen=True)
class EngineSettings:
    """Settings that decide how memory is used.

    Attributes:
        utilization: fraction of the memory that the engine may use, in (0, 1].
        max_num_seqs: maximum number of sequences of one step.
        max_num_batched_tokens: maximum number of tokens of one step.
        block_size: number of tokens of one block.
        max_model_len: maximum length of a sequence in tokens; None if not stated.
        chooses_length: whether the length is stated in a way that the planner cannot resolve, such as
            ``--max-model-len=auto``.
        kv_cache_memory_bytes, num_blocks: size of the KV cache in bytes and in blocks; None if not stated.
        max_loras, num_resident_adapters: maximum number of LoRA adapters in one step and in memory; 0 if none are
            planned for.
        max_lora_rank: maximum rank of an adapter.
        lora_target_modules: modules that adapters may change; empty for all.
        has_graphs: whether a GPU may run steps as CUDA graphs.
    """

    utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int | None = None
    chooses_length: bool = False
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    max_loras: int = 0
    num_resident_adapters: int = 0
    max_lora_rank: int = 0
    lora_target_modules: tuple[str, ...] = ()
    has_graphs: bool = True


def engine_settings(workload: Workload, memory_bytes: int | None, key: str) -> EngineSettings:
    """Return the settings of a workload on the catalogue's accelerator `key`. `memory_bytes` is its memory, or None if
    not known."""
    engine = workload.engine
    words = engine.args or []
    is_stoker = engine.runtime == "stoker"
    unbounded = is_stoker and _word(words, "long_prefill_token_threshold") == "0"
    limits = default_batch_limits(memory_bytes or 0, key, on_cpu=key == CPU, unbounded_prompts=unbounded)

    def number(name: str, otherwise: Any) -> Any:
        """Return a numeric argument, or `otherwise` if it is absent or not a positive number."""
        try:
            value = human_int(_word(words, name) or "")
        except argparse.ArgumentTypeError:
            return otherwise
        return value if 0 < value < _MAX_VALUE else otherwise

    stated_len = number("max_model_len", None)
    # The memory that vLLM uses for adapters is not known.
    max_loras = number("max_loras", _OURS.max_loras) if is_stoker and _is_on(words, "enable_lora") else 0
    # vLLM captures graphs with each of its attention backends.
    backend = (_word(words, "attention_backend") if is_stoker else None) or _OURS.attention_backend
    return EngineSettings(
        utilization=_share(engine.gpu_memory_utilization_percent, _word(words, "gpu_memory_utilization")),
        max_num_seqs=engine.max_num_seqs or number("max_num_seqs", limits.max_num_seqs),
        max_num_batched_tokens=engine.max_num_batched_tokens
        or number("max_num_batched_tokens", limits.max_num_batched_tokens),
        block_size=number("block_size", _OURS.block_size),
        max_model_len=engine.max_model_len or stated_len,
        chooses_length=engine.max_model_len is None
        and stated_len is None
        and _word(words, "max_model_len") is not None,
        kv_cache_memory_bytes=number("kv_cache_memory_bytes", None),
        num_blocks=number("num_gpu_blocks_override", None),
        max_loras=max_loras,
        num_resident_adapters=max_loras and number("max_cpu_loras", max_loras),
        max_lora_rank=max_loras and number("max_lora_rank", _OURS.max_lora_rank),
        lora_target_modules=_several(words, "lora_target_modules") if max_loras else (),
        has_graphs=are_captured(_is_on(words, "enforce_eager"), backend),
    )


def _is_on(words: Sequence[str], name: str) -> bool:
    """Return whether the last of a flag and its negation, such as ``--enable-lora`` and ``--no-enable-lora``, turns it
    on; False if there is neither."""
    flags = {flag_name(name): True, flag_name(f"no_{name}"): False}
    stated = [flags[flag] for word in words if (flag := word.replace("_", "-")) in flags]
    return bool(stated) and stated[-1]


def _share(percent: int | None, word: str | None) -> float:
    if percent is not None:
        return percent / 100
    try:
        share = float(word or "")
    except ValueError:
        return _OURS.gpu_memory_utilization
    return share if 0 < share <= 1 else _OURS.gpu_memory_utilization


def _word(words: Sequence[str], name: str) -> str | None:
    """Return the last value of flag `name` among `words`: ``--name=8`` or ``--name 8``; None without a value."""
    value = None
    for index, word in enumerate(words):
        flag, separator, inline_value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            value = inline_value if separator else words[index + 1] if index + 1 < len(words) else None
    return value


def _several(words: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the values of the last flag `name` among `words`: ``--name=a``, ``--name a b``."""
    values: tuple[str, ...] = ()
    for index, word in enumerate(words):
        flag, separator, inline_value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            values = (inline_value,) if separator else tuple(takewhile(_is_value, words[index + 1 :]))
    return values


def _is_value(word: str) -> bool:
    return not word.startswith("-")

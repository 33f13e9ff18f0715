"""``stoker plan --model … --accelerator …``: builds the equivalent manifest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from stoker_engine.contract.names import ATTENTION_BACKENDS, DTYPES, KV_CACHE_DTYPES
from stoker_operator.api.v1alpha1 import API_VERSION, KIND
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.cli.local_config import model_exists
from stoker_operator.plan.catalogue import Catalogue

Document = dict[str, Any]

_FLAGS: Final = (
    "model", "accelerator", "count", "nodes", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size",
    "min_concurrency", "kv_cache_dtype", "max_model_len", "dtype", "quantization", "runtime", "memory", "topology",
    "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "attention_backend",
    "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules",
)  # fmt: skip

#: Flags of adapters with a number that the engine gets as arguments.
_ADAPTER_WORDS: Final = ("max_loras", "max_cpu_loras", "max_lora_rank")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that replace a manifest."""
    group = parser.add_argument_group("instead of a manifest")
    group.add_argument("--model", metavar="MODEL", help="hub id such as ORG/NAME, or a folder with a config.json")
    group.add_argument("--accelerator", metavar="KEY", help="key of the accelerator catalogue (default: cpu)")
    group.add_argument("--count", type=int, metavar="N", help="accelerators of each pod")
    group.add_argument("--nodes", type=int, metavar="N", help="pods of each replica")
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="accelerators over which each layer is split"
    )
    group.add_argument("--data-parallel-size", "-dp", type=int, metavar="N", help="engines of each replica")
    group.add_argument(
        "--pipeline-parallel-size", "-pp", type=int, metavar="N", help="stages over which the layers are distributed"
    )
    group.add_argument(
        "--min-concurrency", type=int, metavar="N", help="sequences each engine should hold at once (default: 4)"
    )
    group.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="dtype of the KV cache")
    group.add_argument("--max-model-len", type=int, metavar="N", help="maximum number of tokens of prompt and output")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="maximum sequences per step")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="maximum tokens per step, over all sequences"
    )
    group.add_argument(
        "--enforce-eager",
        action="store_const",
        const=True,
        help="launch GPU kernels one by one, without memory for CUDA graphs",
    )
    group.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        help="attention kernels of runtime stoker; only auto and triton need memory for CUDA graphs",
    )
    group.add_argument("--dtype", choices=DTYPES, help="dtype of weights and activations")
    group.add_argument("--quantization", metavar="METHOD", help="quantization of the weights, such as fp8, awq or gptq")
    group.add_argument("--runtime", metavar="NAME", help="the runtime: stoker or vllm (default: stoker)")
    group.add_argument("--memory", metavar="AMOUNT", help="the container's memory, for accelerator cpu, such as 16Gi")
    group.add_argument("--topology", metavar="SHAPE", help="topology of the TPU slice, such as 2x4")
    group.add_argument(
        "--enable-lora", action="store_const", const=True, help="serve LoRA adapters, and reserve memory for them"
    )
    group.add_argument("--max-loras", type=int, metavar="N", help="maximum number of adapters in one step")
    group.add_argument("--max-cpu-loras", type=int, metavar="N", help="maximum number of adapters in CPU memory")
    group.add_argument("--max-lora-rank", type=int, metavar="N", help="maximum rank of an adapter")
    group.add_argument(
        "--lora-target-modules", nargs="+", metavar="NAME", help="modules that adapters may change, such as q_proj"
    )


def document_of(options: argparse.Namespace, catalogue: Catalogue) -> Document:
    """Return the manifest that is equivalent to the flags.

    Raises:
        Refused: the model's path does not exist, a flag contradicts the catalogue or the runtime, or a flag of adapters
            lacks --enable-lora.
    """
    source = source_of(options.model)
    if source.startswith("file:///"):
        model_exists(source, "--model")
    hardware = {"accelerator": options.accelerator or "cpu", "count": options.count, "nodes": options.nodes}
    if options.memory:
        hardware["resources"] = {"limits": {"memory": options.memory}}
    parallelism = {
        "tensor": options.tensor_parallel_size,
        "data": options.data_parallel_size,
        "pipeline": options.pipeline_parallel_size,
        "minConcurrency": options.min_concurrency,
    }
    engine = {
        "runtime": options.runtime,
        "kvCacheDtype": options.kv_cache_dtype,
        "maxModelLen": options.max_model_len,
        "maxNumSeqs": options.max_num_seqs,
        "maxNumBatchedTokens": options.max_num_batched_tokens,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "args": [*_words_about_graphs(options), *_words_about_adapters(options)] or None,
    }
    spec: Document = {"model": {"source": source}, "hardware": _without_none(hardware)}
    if _without_none(parallelism):
        spec["parallelism"] = _without_none(parallelism)
    if _without_none(engine):
        spec["engine"] = _without_none(engine)
    if options.topology:
        label = catalogue.accelerator(hardware["accelerator"]).topology_label
        if label is None:
            problem = f"{hardware['accelerator']} has no topologies to choose from"
            raise Refused(Violation("--topology", problem, "remove it"))
        spec["template"] = {"spec": {"nodeSelector": {label: options.topology}}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "plan"}, "spec": spec}


def _words_about_graphs(options: argparse.Namespace) -> list[str]:
    words = ["--enforce-eager"] if options.enforce_eager else []
    if options.attention_backend is None:
        return words
    if options.runtime not in (None, "stoker"):
        problem = f"names attention kernels of runtime stoker, and the runtime is {options.runtime}"
        raise Refused(Violation("--attention-backend", problem, "omit it"))
    return [*words, f"--attention-backend={options.attention_backend}"]


def _words_about_adapters(options: argparse.Namespace) -> list[str]:
    stated = {name: getattr(options, name) for name in _ADAPTER_WORDS}
    if not options.enable_lora:
        for name, value in {**stated, "lora_target_modules": options.lora_target_modules}.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise Refused(Violation(flag, "requires --enable-lora", "add it, or omit this flag"))
        return []
    words = ["--enable-lora"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in stated.items() if value is not None]
    return words + (["--lora-target-modules", *options.lora_target_modules] if options.lora_target_modules else [])


def source_of(model: str) -> str:
    """Return the model source for a hub id or a path; a source is returned unchanged.

    As for ``stoker serve``, a missing GGUF file of an existing folder is a path.
    """
    if "://" in model:
        return model
    path = Path(model)
    is_file = path.suffix == ".gguf" and path.parent.is_dir()
    if path.exists() or is_file or model.startswith(("/", "./", "../", "~")):
        return f"file://{Path(model).expanduser().resolve()}"
    return f"hf://{model}"


def flags_given(options: argparse.Namespace) -> list[str]:
    """Return the given flags that replace a manifest."""
    return [f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(options, name) is not None]


def _without_none(values: Document) -> Document:
    return {name: value for name, value in values.items() if value is not None}

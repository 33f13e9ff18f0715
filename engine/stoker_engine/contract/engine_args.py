"""The arguments of the engine, with vLLM's names."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, replace
from typing import Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract import argv, names
from stoker_engine.contract.argv import flag

#: Why ``--enable-expert-parallel`` is refused beside several engines, here and by the planner.
ENGINES_SHARE_NO_EXPERTS: Final = (
    "engines of a model share no experts: those of an engine are dealt over its own devices"
)


@dataclass(frozen=True)
class EngineArgs:
    """How a model is loaded and run. ``LLM(model, **fields)`` takes the same fields.

    Raises:
        ArgumentError: a value is out of range or not supported, naming the flag and the remedy.
    """

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    served_model_name: tuple[str, ...] = flag(
        "name(s) the API answers to; the first is reported in responses and metrics", ()
    )
    revision: str | None = flag("branch, tag or commit of a hub model", None)
    dtype: names.Dtype = flag(
        "weights and activations; auto: the checkpoint's own; for GGUF bfloat16, unless all its numbers are float32",
        "auto",
        choices=names.DTYPES,
    )
    quantization: str | None = flag(
        "how weights are stored; int8, int4 and fp8 quantize when loading; default: as the checkpoint says", None
    )
    trust_remote_code: bool = flag("let a model run Python code of its own", False)
    tokenizer: str | None = flag("a folder or hub id whose tokenizer is taken instead of the model's", None)
    generation_config: str = flag(
        "where sampling defaults come from: auto (the model's generation_config.json), vllm (none), or a folder", "auto"
    )
    max_model_len: int | None = flag("longest sequence, prompt and output; default: the model's own", None)
    seed: int = flag("seeds the requests that do not seed themselves, so that a restart repeats a run", 0)
    device: names.Device = flag("where to run; auto takes the accelerator there is", "auto", choices=names.DEVICES)
    attention_backend: names.AttentionBackend = flag(
        "what computes attention; auto: native, triton or sdpa; native: the CPU's kernels; triton: a GPU's; sdpa: "
        "torch's own, anywhere; flash-attn and flashinfer: these packages, where they are installed",
        "auto",
        choices=names.ATTENTION_BACKENDS,
    )

    block_size: int = flag("tokens in one KV-cache block", 16, group="KV cache")
    gpu_memory_utilization: float = flag("share of the device's memory the engine may use, 0 to 1", 0.92)
    kv_cache_memory_bytes: int | None = flag("size of the KV cache; overrides --gpu-memory-utilization", None)
    num_gpu_blocks_override: int | None = flag(
        "exact number of KV-cache blocks, one of them never used; overrides both", None
    )
    kv_cache_dtype: names.KVCacheDtype = flag(
        "how keys and values are stored; auto: in the model's dtype; fp8: with the checkpoint's scales, or 1",
        "auto",
        choices=names.KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = flag("reuse KV-cache blocks of equal prefixes", True)

    max_num_seqs: int = flag("most sequences in one step", 256, group="scheduling")
    max_num_batched_tokens: int = flag("most tokens in one step, over all sequences", 2048)
    enable_chunked_prefill: bool = flag("let a prompt be computed in several steps, beside other requests", True)
    long_prefill_token_threshold: int | None = flag(
        "most tokens of prompts in a step while other requests decode, whatever time they take; 0: all that decodes "
        "leave; default: as many as --max-itl-ms has time for",
        None,
    )
    max_itl_ms: float | None = flag(
        "most milliseconds between two tokens of a request while prompts are computed beside it; default: four times "
        "what it is without; --long-prefill-token-threshold takes precedence",
        None,
    )
    scheduling_policy: names.SchedulingPolicy = flag(
        "who is served first: fcfs (first come) or priority (a request's own number, the lowest first)",
        "fcfs",
        choices=names.SCHEDULING_POLICIES,
    )
    async_scheduling: bool = flag(
        "schedule a step while the one before it still runs; of use where the model leaves the host a processor", False
    )
    max_logprobs: int = flag("most logprobs a request may have at a position; -1: no limit", 20, group="results")
    batch_invariant: bool = flag(
        "insist that a request gives the same bits in any batch, chunking or prefix hit: what the CPU's kernels do "
        "anyway, and a GPU's more slowly; refused where it cannot be kept",
        False,
    )

    enable_lora: bool = flag("serve LoRA adapters beside the model", False, group="LoRA")
    max_loras: int = flag("most adapters in one step", 8)
    max_cpu_loras: int | None = flag(
        "most adapters kept in memory, those of the step included; others are read again when they are needed; "
        "default: --max-loras",
        None,
    )
    max_lora_rank: int = flag("largest rank of an adapter", 16)
    lora_dtype: names.Dtype = flag("adapters' matrices; auto: the model's", "auto", choices=names.DTYPES)
    lora_target_modules: tuple[str, ...] = flag(
        "the modules that adapters may change, by the last part of their names (q_proj …); default: all", ()
    )

    enforce_eager: bool = flag(
        "launch a GPU's kernels one by one: without CUDA graphs, which decodes are replayed by", False
    )

    tensor_parallel_size: int = flag("devices each layer is split over", 1, group="parallelism", short="-tp")
    pipeline_parallel_size: int = flag("groups of devices the layers are spread over", 1, short="-pp")
    data_parallel_size: int = flag("engines of the model", 1, short="-dp")
    enable_expert_parallel: bool = flag("deal out a mixture's experts to the devices instead of splitting each", False)

    nnodes: int = flag("machines that serve the model together, each with as many of its ranks", 1, group="nodes")
    node_rank: int = flag("this machine's number; 0 is the head, which serves the API, the others are headless", 0)
    master_addr: str | None = flag("the head's address or name, as the other nodes reach it", None)
    master_port: int = flag(
        "port on which node 0 waits for the others; each further engine of the model adds one", 29501
    )
    distributed_timeout_seconds: int = flag("how long nodes wait for each other", 600)

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "nnodes",
            "distributed_timeout_seconds",
        ):
            if getattr(self, name) < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {getattr(self, name)}")
        for name in ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"):
            if not self.enable_lora and getattr(self, name) != getattr(EngineArgs, name, ()):
                raise ArgumentError(
                    argv.flag_name(name), "means nothing without --enable-lora; add it, or leave this out"
                )
        for name in ("max_loras", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {getattr(self, name)}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ArgumentError(
                "--max-cpu-loras",
                f"must be at least --max-loras ({self.max_loras}), whose adapters it includes; "
                f"got {self.max_cpu_loras}",
            )
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {value}")
        threshold = self.long_prefill_token_threshold
        if threshold is not None and threshold < 0:
            raise ArgumentError(
                "--long-prefill-token-threshold", f"must be at least 1, or 0 for no limit, got {threshold}"
            )
        if threshold and not self.enable_chunked_prefill:
            raise ArgumentError(
                "--long-prefill-token-threshold",
                "cuts prompts, which --no-enable-chunked-prefill forbids; leave one of the two out",
            )
        if self.max_itl_ms is not None:
            if not 0 < self.max_itl_ms < math.inf:
                raise ArgumentError("--max-itl-ms", f"must be finite and above 0, got {self.max_itl_ms:g}")
            if not self.enable_chunked_prefill:
                raise ArgumentError(
                    "--max-itl-ms",
                    "cuts prompts, which --no-enable-chunked-prefill forbids; leave one of the two out",
                )
        for name, allowed in (
            ("dtype", names.DTYPES),
            ("lora_dtype", names.DTYPES),
            ("kv_cache_dtype", names.KV_CACHE_DTYPES),
            ("device", names.DEVICES),
            ("attention_backend", names.ATTENTION_BACKENDS),
            ("scheduling_policy", names.SCHEDULING_POLICIES),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(argv.flag_name(name), f"{getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ArgumentError(
                "--gpu-memory-utilization",
                f"must be above 0 and at most 1, got {self.gpu_memory_utilization}",
            )
        if self.max_logprobs < -1:
            raise ArgumentError("--max-logprobs", f"must be at least 0, or -1 for no limit, got {self.max_logprobs}")
        if self.enable_expert_parallel and self.data_parallel_size > 1:
            raise ArgumentError(
                "--enable-expert-parallel",
                f"{ENGINES_SHARE_NO_EXPERTS}; leave it out, or use --data-parallel-size 1 and more servers",
            )
        if self.block_size & (self.block_size - 1):
            raise ArgumentError("--block-size", f"must be a power of two, got {self.block_size}")
        self._check_nodes()

    @property
    def num_resident_adapters(self) -> int:
        """Most adapters in memory; 0: none are served."""
        if not self.enable_lora:
            return 0
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def offline(self) -> EngineArgs:
        """These arguments for a caller that does not stream: unless they bound prompts themselves, prompts get all
        tokens that decodes leave, and equal runs have equal steps."""
        if self.long_prefill_token_threshold is not None or self.max_itl_ms is not None:
            return self
        return replace(self, long_prefill_token_threshold=0)

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            nodes = "there is one node" if self.nnodes == 1 else f"there are {self.nnodes} nodes"
            raise ArgumentError(
                "--node-rank", f"must be 0 to {self.nnodes - 1}, as {nodes} (--nnodes), got {self.node_rank}"
            )
        if self.nnodes == 1:
            return
        if not self.master_addr:
            raise ArgumentError("--master-addr", "name node 0's address, by which the other nodes reach it")
        _check_address(self.master_addr)
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        if ranks % self.nnodes:
            raise ArgumentError(
                "--nnodes",
                f"{self.nnodes} nodes cannot have equally many of {ranks} ranks (--tensor-parallel-size × "
                "--pipeline-parallel-size × --data-parallel-size); choose a number that divides them",
            )
        last = self.master_port + self.data_parallel_size - 1
        if self.master_port < 1 or last > 65535:
            ports = f"{self.master_port}" if self.data_parallel_size == 1 else f"{self.master_port} to {last}"
            raise ArgumentError("--master-port", f"ports are 1 to 65535, got {ports} (one for each engine)")


def _check_address(address: str) -> None:
    """Refuses what nobody can connect to."""
    try:
        if ipaddress.ip_address(address).is_unspecified:
            raise ArgumentError("--master-addr", f"{address} is no address by which other nodes reach node 0; name one")
    except ValueError:
        if not _is_name(address):
            raise ArgumentError(
                "--master-addr",
                f"{address!r} is no address or name; write it without brackets, and the port in --master-port",
            ) from None


def _is_name(name: str) -> bool:
    """Whether name servers can be asked for it."""
    try:
        name.encode("idna")
    except UnicodeError:  # a part of it is empty, or too long
        return False
    return name.isprintable() and not set(name) & set(":/[]@ ")

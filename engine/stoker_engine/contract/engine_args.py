"""Arguments of the engine, with vLLM's names."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, replace
from typing import Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract import argv, names
from stoker_engine.contract.argv import flag

#: Why ``--enable-expert-parallel`` is refused with several engines, by `EngineArgs` and by the planner.
ENGINES_SHARE_NO_EXPERTS: Final = (
    "data-parallel engines do not share experts: an engine distributes its experts over its own devices"
)


@dataclass(frozen=True)
class EngineArgs:
    """How a model is loaded and run. ``LLM(model, **fields)`` takes the same fields.

    Raises:
        ArgumentError: a value is out of range or not supported; the message names the flag and the remedy.
    """

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    served_model_name: tuple[str, ...] = flag(
        "names of the model in the API; responses and metrics report the first", ()
    )
    revision: str | None = flag("branch, tag or commit of a hub model", None)
    dtype: names.Dtype = flag(
        "dtype of weights and activations; auto: the checkpoint's; for GGUF bfloat16, or float32 if all weights are",
        "auto",
        choices=names.DTYPES,
    )
    quantization: str | None = flag(
        "weight quantization; int8, int4 and fp8 quantize while loading; default: the checkpoint's", None
    )
    trust_remote_code: bool = flag("run Python code that comes with a model", False)
    tokenizer: str | None = flag("folder or hub id of another tokenizer; default: the model's", None)
    generation_config: str = flag(
        "source of default sampling parameters: auto (the model's generation_config.json), vllm (none), or a folder",
        "auto",
    )
    max_model_len: int | None = flag("maximum tokens of a sequence, prompt and output; default: the model's", None)
    seed: int = flag("random seed of requests that set none; a run with the same seed can be repeated", 0)
    device: names.Device = flag("device; auto takes an accelerator if there is one", "auto", choices=names.DEVICES)
    attention_backend: names.AttentionBackend = flag(
        "attention kernels; native: for CPUs; triton: for GPUs; sdpa: torch's, for any device; flash-attn, "
        "flashinfer and fa3: these packages, if installed; auto: native, triton or sdpa",
        "auto",
        choices=names.ATTENTION_BACKENDS,
    )

    block_size: int = flag("tokens per KV cache block", 16, group="KV cache")
    gpu_memory_utilization: float = flag("fraction of the device's memory that the engine may use, 0 to 1", 0.92)
    kv_cache_memory_bytes: int | None = flag("size of the KV cache; overrides --gpu-memory-utilization", None)
    num_gpu_blocks_override: int | None = flag(
        "exact number of KV cache blocks, one of which is never used; overrides --gpu-memory-utilization and "
        "--kv-cache-memory-bytes",
        None,
    )
    kv_cache_dtype: names.KVCacheDtype = flag(
        "dtype of the KV cache; auto: the model's; fp8: with the checkpoint's scales, or 1",
        "auto",
        choices=names.KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = flag("reuse KV cache blocks of shared prefixes", True)

    max_num_seqs: int | None = flag(
        "maximum sequences per step; default: 1,024 on GPUs with 70 GiB and more, except A100; otherwise 256",
        None,
        group="scheduling",
    )
    max_num_batched_tokens: int | None = flag(
        "maximum tokens per step, over all sequences; default: 16,384 on GPUs with 160 GiB and more, 8,192 with 70 GiB "
        "and more, except A100; otherwise 2,048; offline 16,384 on these GPUs, and 8,192 on others",
        None,
    )
    enable_chunked_prefill: bool = flag("allow a prompt to be computed in several steps, beside other requests", True)
    long_prefill_token_threshold: int | None = flag(
        "maximum prompt tokens per step while other requests decode; 0: all that the decodes leave of the step; "
        "default: as many as --max-itl-ms allows",
        None,
    )
    max_itl_ms: float | None = flag(
        "maximum milliseconds between two tokens of a request while prompts are computed beside it; default: four "
        "times the latency without prompts; --long-prefill-token-threshold takes precedence",
        None,
    )
    scheduling_policy: names.SchedulingPolicy = flag(
        "order of requests: fcfs (first come, first served) or priority (lowest priority number first)",
        "fcfs",
        choices=names.SCHEDULING_POLICIES,
    )
    async_scheduling: bool | None = flag(
        "schedule a step while the previous one runs; on CPUs it helps if the model leaves a core idle; default: on "
        "GPUs, unless drafts are verified",
        None,
    )
    max_logprobs: int = flag("maximum logprobs per position; -1: no limit", 20, group="results")
    batch_invariant: bool = flag(
        "guarantee that the result of a request has the same bits in any batch, with any chunking or prefix hit; CPU "
        "kernels always do so, GPU kernels become slower; refused if impossible",
        False,
    )

    enable_lora: bool = flag("serve LoRA adapters", False, group="LoRA")
    max_loras: int = flag("maximum adapters per step", 8)
    max_cpu_loras: int | None = flag(
        "maximum adapters in memory, including those of the step; others are reloaded when needed; "
        "default: --max-loras",
        None,
    )
    max_lora_rank: int = flag("maximum rank of an adapter", 16)
    lora_dtype: names.Dtype = flag("dtype of the adapters; auto: the model's", "auto", choices=names.DTYPES)
    lora_target_modules: tuple[str, ...] = flag(
        "modules that adapters may change, by the last part of their names (q_proj …); default: all", ()
    )

    enforce_eager: bool = flag("launch GPU kernels one by one, without CUDA graphs", False, group="GPU")
    fp8_weight_only: bool = flag(
        "multiply FP8 weights with unquantized activations, also on GPUs with FP8 tensor cores", False
    )

    tensor_parallel_size: int = flag("devices over which each layer is split", 1, group="parallelism", short="-tp")
    pipeline_parallel_size: int = flag("pipeline stages over which the layers are distributed", 1, short="-pp")
    data_parallel_size: int = flag("number of data-parallel engines", 1, short="-dp")
    enable_expert_parallel: bool = flag("distribute experts over the devices instead of splitting each expert", False)

    nnodes: int = flag("machines that serve the model together, with an equal number of ranks", 1, group="nodes")
    node_rank: int = flag("number of this machine; 0 is the head, which serves the API; the others are headless", 0)
    master_addr: str | None = flag("address or name of node 0, as the other nodes reach it", None)
    master_port: int = flag("port on which node 0 waits for the others; each further engine uses the next port", 29501)
    distributed_timeout_seconds: int = flag(
        "seconds that nodes wait to be connected, at the start and after a lost connection", 600
    )

    def __post_init__(self) -> None:
        for name in (
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
                raise ArgumentError(argv.flag_name(name), "requires --enable-lora; add it, or omit this flag")
        for name in ("max_loras", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {getattr(self, name)}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ArgumentError(
                "--max-cpu-loras",
                f"must be at least --max-loras ({self.max_loras}), because it includes these adapters; "
                f"got {self.max_cpu_loras}",
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
        ):
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
                "splits prompts, which --no-enable-chunked-prefill forbids; omit one of the two flags",
            )
        if self.max_itl_ms is not None:
            if not 0 < self.max_itl_ms < math.inf:
                raise ArgumentError("--max-itl-ms", f"must be finite and above 0, got {self.max_itl_ms:g}")
            if not self.enable_chunked_prefill:
                raise ArgumentError(
                    "--max-itl-ms",
                    "splits prompts, which --no-enable-chunked-prefill forbids; omit one of the two flags",
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
                f"{ENGINES_SHARE_NO_EXPERTS}; omit it, or use --data-parallel-size 1 and more servers",
            )
        if self.block_size & (self.block_size - 1):
            raise ArgumentError("--block-size", f"must be a power of two, got {self.block_size}")
        self._check_nodes()

    @property
    def num_resident_adapters(self) -> int:
        """Maximum number of adapters in memory; 0 without LoRA."""
        if not self.enable_lora:
            return 0
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def offline(self) -> EngineArgs:
        """Return arguments for a caller that does not stream: without an explicit limit, prompts may fill each step.

        The default limit depends on measured times; without it, equal runs have equal steps.
        """
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
            raise ArgumentError("--master-addr", "is required with several nodes: address of node 0")
        _check_address(self.master_addr)
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        if ranks % self.nnodes:
            raise ArgumentError(
                "--nnodes",
                f"{ranks} ranks (--tensor-parallel-size × --pipeline-parallel-size × --data-parallel-size) cannot be "
                f"distributed equally over {self.nnodes} nodes; choose a divisor of {ranks}",
            )
        last = self.master_port + self.data_parallel_size - 1
        if self.master_port < 1 or last > 65535:
            ports = f"{self.master_port}" if self.data_parallel_size == 1 else f"{self.master_port} to {last}"
            raise ArgumentError("--master-port", f"ports are 1 to 65535, got {ports} (one for each engine)")


def _check_address(address: str) -> None:
    """Refuse an unspecified IP address (``0.0.0.0``, ``::``), and text that is neither an IP address nor a name."""
    try:
        if ipaddress.ip_address(address).is_unspecified:
            raise ArgumentError("--master-addr", f"{address} is not an address to which other nodes can connect")
    except ValueError:
        if not _is_name(address):
            raise ArgumentError(
                "--master-addr",
                f"{address!r} is neither an address nor a name; omit brackets, and set the port with --master-port",
            ) from None


def _is_name(name: str) -> bool:
    """Return whether `name` may be a host name, without URL scheme, port or brackets."""
    try:
        name.encode("idna")
    except UnicodeError:  # a part of it is empty, or too long
        return False
    return name.isprintable() and not set(name) & set(":/[]@ ")

"""The inference engine in each pod, and its settings."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from stoker_engine.contract.names import Dtype, KVCacheDtype
from stoker_operator.api.v1alpha1.base import ByName, Part
from stoker_operator.api.v1alpha1.env import EnvVar

ImagePullPolicy = Literal["Always", "IfNotPresent", "Never"]
DEFAULT_GPU_MEMORY_UTILIZATION_PERCENT: Final = 92
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Engine(Part):
    """The inference engine in each pod, and its settings."""

    runtime: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = "stoker"
    """Runtime of the engine, one of those in the accelerator catalogue, such as stoker or vllm. Absent: stoker."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")] | None = None
    """Container image. Absent: the catalogue's for this runtime and accelerator."""
    image_pull_policy: ImagePullPolicy | None = None
    """When nodes pull the image. Absent: Always for the tag latest, else IfNotPresent."""
    dtype: Dtype | None = None
    """Type of weights and activations. auto, or absent: the runtime's choice; stoker's is that of the checkpoint, but
    on accelerator cpu bfloat16 for float16 checkpoints with quantized weights; for GGUF it is bfloat16, unless all
    weights are float32."""
    quantization: (
        Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-_a-z0-9]*[a-z0-9])?$")] | None
    ) = None
    """Quantization method, with vLLM's names: awq, gptq, fp8, compressed-tensors, bitsandbytes and others. The runtime
    and the accelerator must support it. With runtime stoker, int8, int4 and fp8 quantize an unquantized checkpoint when
    it is loaded. Absent: the checkpoint's method."""
    kv_cache_dtype: KVCacheDtype | None = None
    """Type of the KV cache. fp8 (fp8_e4m3) uses the checkpoint's scales, or 1 if it has none. fp8_e5m2 has no scales;
    runtime stoker refuses it with a checkpoint that has scales. fp8_per_token_head and int8_per_token_head keep a scale
    for each token and head. auto, or absent: the type of activations."""
    max_num_seqs: Positive | None = None
    """Maximum number of sequences in one step. Absent: 1024 on accelerators with at least 70 GiB, except A100; 256 on
    others."""
    max_num_batched_tokens: Positive | None = None
    """Maximum number of tokens in one step, over all sequences. Absent: 16384 on accelerators with at least 160 GiB,
    8192 with at least 70 GiB, except A100; 2048 on others."""
    max_model_len: Positive | None = None
    """Maximum length of a sequence in tokens, prompt and output. Absent: the longest that fits into memory, at most the
    model's own maximum, or with longrope or dynamic RoPE its original length; the engine's default if the model's shape
    is not known."""
    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of each accelerator's memory, or on accelerator cpu of the container's, that the engine may use, in
    percent. Absent: 92."""
    enable_prefix_caching: bool | None = None
    """Whether requests reuse the cached prefix of earlier requests. Absent: the runtime's default, usually true."""
    args: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=64)] | None = None
    """Additional arguments of the engine's command line, for flags that have no field here. A flag that contradicts a
    field is refused."""
    env: Annotated[list[EnvVar], Field(max_length=64), *ByName] | None = None
    """Additional environment variables of the engine's container."""

    @property
    def gpu_memory_utilization(self) -> float:
        """`gpu_memory_utilization_percent`, or its default, as a fraction."""
        return (self.gpu_memory_utilization_percent or DEFAULT_GPU_MEMORY_UTILIZATION_PERCENT) / 100

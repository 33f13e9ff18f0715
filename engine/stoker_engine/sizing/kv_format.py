"""How the numbers of the KV cache are stored, by the names of ``--kv-cache-dtype`` (vLLM's).

    auto                  the model's dtype
    bfloat16              bfloat16
    fp8, fp8_e4m3         float8 e4m3, times one scale a layer: the checkpoint's, or 1
    fp8_e5m2              float8 e5m2: float16's range, and no scale
    fp8_per_token_head    float8 e4m3, times a scale for each token and head, made as it is stored
    int8_per_token_head   int8, scaled as above

The scale of a token and head is float32 and lies in the token's block, beside what it is the scale of: keys have one,
values another, and the latent vector of multi-head latent attention has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.sizing.dtype_sizes import element_bytes

_FLOAT32: Final = 4

_STORED: Final = {
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_per_token_head": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}


@dataclass(frozen=True)
class KVFormat:
    """How the numbers of the KV cache are stored.

    Attributes:
        dtype: of a number of a key or value, by torch's name.
        element_bytes: of such a number.
        state_bytes: of a number of a state (`StateSpec`), which is stored as the model computes it.
        scale_bytes: of the scale that each token has for each head's key, and for its value; 0: there is none.
    """

    dtype: str
    element_bytes: int
    state_bytes: int
    scale_bytes: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are stored in 8 bits, and stand for themselves times a scale."""
        return self.element_bytes == 1

    def token_bytes(self, spec: CacheSpec) -> int:
        """Bytes that one token takes in a layer: whole scales, so that those of the next layer lie where floats may."""
        size = spec.numbers_per_token * self.element_bytes
        if self.scale_bytes:
            size += self.num_scales(spec) * self.scale_bytes
            size = -(-size // self.scale_bytes) * self.scale_bytes
        return size

    def num_scales(self, spec: CacheSpec) -> int:
        """How many scales one token has in a layer, where it has any."""
        return spec.num_kv_heads * (1 if spec.latent else 2)


def kv_format(kv_cache_dtype: str, model_dtype: str) -> KVFormat:
    """The format that ``--kv-cache-dtype`` asks for, in a model that computes in `model_dtype`.

    Args:
        kv_cache_dtype: one of `contract.names.KV_CACHE_DTYPES`.
        model_dtype: a config.json's, or torch's name (``bfloat16``, ``torch.bfloat16``).
    """
    model_dtype = model_dtype.removeprefix("torch.")
    dtype = _STORED.get(kv_cache_dtype, model_dtype)
    scale_bytes = _FLOAT32 if kv_cache_dtype.endswith("_per_token_head") else 0
    return KVFormat(dtype, element_bytes(dtype), element_bytes(model_dtype), scale_bytes)

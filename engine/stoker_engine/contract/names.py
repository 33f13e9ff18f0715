"""The field's words, spelled once: dtypes, KV-cache dtypes, devices."""

from __future__ import annotations

from typing import Final, Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]

DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
KV_CACHE_DTYPES: Final[tuple[str, ...]] = get_args(KVCacheDtype)
DEVICES: Final[tuple[str, ...]] = get_args(Device)
SCHEDULING_POLICIES: Final[tuple[str, ...]] = get_args(SchedulingPolicy)

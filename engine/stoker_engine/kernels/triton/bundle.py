"""Triton's kernels as one bundle; what has none runs as the reference does."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.activation import act_and_mul, activation
from stoker_engine.kernels.triton.argmax import argmax
from stoker_engine.kernels.triton.rms_norm import rms_norm
from stoker_engine.kernels.triton.rotary import apply_rotary
from stoker_engine.kernels.triton.token_mask import keep_allowed

TRITON: Final = replace(
    REFERENCE,
    rms_norm=lambda weight, eps: lambda x: rms_norm(x, weight, eps),
    activation=activation,
    act_and_mul=act_and_mul,
    apply_rotary=apply_rotary,
    argmax=argmax,
    keep_allowed=keep_allowed,
)

"""Compiles kernels for GPUs that this machine need not have, and reports their use of registers, memory, tensor cores.

    python -m stoker_engine.kernels.triton.compile.ahead_of_time sm_90 gfx942 …  prints a line of JSON for each variant

Values that do not fit into registers are spilled to memory, which is hundreds of times slower; no kernel may spill.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker_engine.kernels.triton.attention import (
    decode,
    kv_store,
    merge,
    mla_rope_and_cache,
    prefill,
    rope_and_cache,
)
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import ABSENT, KernelVariant
from stoker_engine.kernels.triton.common.occupancy import occupancy
from stoker_engine.kernels.triton.gemm import (
    batch_invariant_gemm,
    grouped_gemm,
    grouped_packed_gemm,
    grouped_quant_gemm,
    grouped_w8a8_gemm,
    packed_quant_gemm,
    quant_gemm,
    scale_sums,
    sum_parts,
    w8a8_gemm,
)
from stoker_engine.kernels.triton.lora import lora_expand, lora_shrink
from stoker_engine.kernels.triton.moe import align, combine, route
from stoker_engine.kernels.triton.ops import activation, concat_rotated, layer_norm, quantize_rows, rms_norm, rotary
from stoker_engine.kernels.triton.quant import dequantize_packed, packed_rows
from stoker_engine.kernels.triton.sampling import argmax, logprobs, select_token, token_mask

#: Targets of compilation: NVIDIA's compute capabilities and AMD's architectures.
TARGETS: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")
_MODULES: Final = (
    decode,
    prefill,
    merge,
    kv_store,
    rope_and_cache,
    mla_rope_and_cache,
    concat_rotated,
    rms_norm,
    layer_norm,
    activation,
    quantize_rows,
    rotary,
    argmax,
    token_mask,
    select_token,
    logprobs,
    route,
    align,
    grouped_quant_gemm,
    grouped_packed_gemm,
    grouped_gemm,
    combine,
    quant_gemm,
    packed_quant_gemm,
    sum_parts,
    w8a8_gemm,
    grouped_w8a8_gemm,
    scale_sums,
    dequantize_packed,
    packed_rows,
    batch_invariant_gemm,
    lora_shrink,
    lora_expand,
)
#: Types of strides that are arguments, and of those in a tuple, which take 32 bits if they fit.
_STRIDES: Final = (("i64",), ("i32",))
_TENSOR_CORES: Final = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "v_mfma")


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel.

    Attributes:
        registers: 32-bit registers of a thread; on AMD, vector and accumulation registers together.
        spilled: bytes of a thread's stack and local memory; on AMD, of private memory, plus spilled vector registers.
        shared: shared memory of a program, in bytes.
        occupancy: see `kernels.triton.common.occupancy`.
        tensor_cores: kinds of tensor-core instructions in its code.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    occupancy: float
    tensor_cores: tuple[str, ...]


def kernel_variants(target: str) -> dict[str, KernelVariant]:
    """Return all variants for a target, by name."""
    return {each.name: each for module in _MODULES for each in module.kernel_variants(GpuTarget.of(target))}


def gpu_target(name: str) -> GPUTarget:
    """Return Triton's description of a target in `TARGETS`."""
    return GPUTarget("hip", name, 64) if _is_amd(name) else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)


def _is_amd(target: str) -> bool:
    return target.startswith("gfx")


def compiled(variant: KernelVariant, target: str) -> Resources:
    """Compile a variant for a target in `TARGETS`; return what it uses."""
    is_amd, gpu = _is_amd(target), gpu_target(target)
    # As at usual launches, tensors are aligned to 16 bytes, and strides (except those of scales) are multiples of 16.
    # Arguments that change between steps are not specialized.
    aligned = {
        path: [["tt.divisibility", 16]]
        for path, name, kind in variant.elements()
        if not variant.kernel.params[path[0]].do_not_specialize
        and (kind.startswith("*") or (kind in _STRIDES[len(path) > 1] and "scale" not in name))
    }
    absent = {path: None for path, _, kind in variant.elements() if len(path) > 1 and kind == ABSENT}
    constants = dict(variant.constants) | absent
    source = ASTSource(variant.kernel, dict(variant.signature), constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=gpu, options=options)
    text = made.asm["amdgcn" if is_amd else "ptx"]
    registers, spilled = _of_amd(text) if is_amd else _of_cubin(made.asm["cubin"])
    used = tuple(each for each in _TENSOR_CORES if each in text)
    shared = made.metadata.shared
    filled = round(occupancy(target, made.metadata.num_warps, registers, shared), 4)
    return Resources(variant.name, target, registers, spilled, shared, filled, used)


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [program, "--dump-resource-usage", file.name], stdout=subprocess.PIPE, text=True, check=True
        )
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_amd(text: str) -> tuple[int, int]:
    # Scalar registers are spilled to lanes of vector registers, not to memory.
    names = "vgpr_count|vgpr_spill_count|private_segment_fixed_size"
    found = {name: int(number) for name, number in re.findall(rf"\.({names}): +(\d+)", text)}
    registers = found.pop("vgpr_count")
    return registers, sum(found.values())


def main(targets: list[str]) -> Iterator[Resources]:
    """Compile all variants for the given targets (default: all), and yield the resources that each uses."""
    for target in targets or TARGETS:
        for variant in kernel_variants(target).values():
            yield compiled(variant, target)


if __name__ == "__main__":
    for resources in main(sys.argv[1:]):
        print(json.dumps(asdict(resources)), flush=True)

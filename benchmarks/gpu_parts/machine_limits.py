"""The machine's speeds: copies in memory, GEMMs, transfers to and from the host, launches of kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu_parts.context import Context
from gpu_parts.figures import Figure
from gpu_parts.timing import copy_bandwidth, median_ms, synchronize

#: Launches in a row, of which the mean is taken.
_LAUNCHES = 1000


def measure(context: Context) -> None:
    """Record the figures."""
    scale, device = context.scale, context.device
    settings = f"{scale.copied >> 20} MiB, reads and writes both counted"
    value = copy_bandwidth(device, scale.copied)
    context.add(Figure("machine/copy", "copy in the device's memory", value, "GB/s", settings))
    size = scale.gemm
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    took = median_ms(lambda: a @ b.T, device)
    rate = 2 * size**3 / took / 1e9
    context.add(Figure("machine/gemm-bf16", "GEMM in bfloat16", rate, "TFLOP/s", f"{size}³, torch"))
    multiply = _fp8_gemm(a, b)
    if multiply is not None:
        rate = 2 * size**3 / median_ms(multiply, device) / 1e9
        settings = f"{size}³, torch, one scale a row"
        context.add(Figure("machine/gemm-fp8", "GEMM in float8", rate, "TFLOP/s", settings))
    for name, title in (("h2d", "copy from pinned memory to the device"), ("d2h", "copy from the device to pinned")):
        pinned = torch.empty(scale.copied // 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_device = torch.empty_like(pinned, device=device)
        source, target = (pinned, on_device) if name == "h2d" else (on_device, pinned)
        took = median_ms(lambda s=source, t=target: t.copy_(s, non_blocking=True), device, in_graph=False)  # type: ignore[misc]
        context.add(Figure(f"machine/{name}", title, len(pinned) / took / 1e6, "GB/s", f"{len(pinned) >> 20} MiB"))
    context.add(Figure("machine/launch", "launch of a kernel by torch", _launch_us(device), "µs", "in a row"))


def _fp8_gemm(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object] | None:
    """Return a GEMM of float8 with a scale for each row, or None if torch has none for this device."""
    scales = torch.ones(len(a), 1, device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

    def multiply() -> torch.Tensor:
        product: torch.Tensor = torch._scaled_mm(
            left, right.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.bfloat16
        )
        return product

    try:
        multiply()
        synchronize(a.device)
    except (RuntimeError, NotImplementedError):  # the device has no tensor cores for float8
        return None
    return multiply


def _launch_us(device: torch.device) -> float:
    value = torch.zeros(16, device=device)
    for _ in range(_LAUNCHES):
        value.add_(1)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_LAUNCHES):
        value.add_(1)
    took = time.perf_counter() - began
    synchronize(device)
    return 1e6 * took / _LAUNCHES

"""Compare Stoker's GPU attention with a device copy (decode) and torch's attention (prefill).

    python benchmarks/attention.py [--json FILE]

Targets: a decode that reads at least 256 MB of keys and values per layer reaches 90 % of the bandwidth of a copy; a
prefill reaches 80 % of torch's scaled_dot_product_attention, which uses cuDNN or FlashAttention on NVIDIA GPUs. Times
are medians of several runs, measured by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_parts.paged import paged_attention
from gpu_parts.scale import Attention
from gpu_parts.timing import copy_bandwidth, median_ms
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

BLOCK, DEVICE = 16, torch.device("cuda")

LAYERS = {
    "Llama-3-8B": Attention(32, 8, 128),
    "Qwen3-0.6B": Attention(16, 8, 128),
    "Gemma 3 1B": Attention(4, 1, 256),
    "one KV head": Attention(8, 1, 128),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        reached: GB/s of a decode, TFLOP/s of a prefill.
        of: reference in the same unit: bandwidth of a copy, or torch's attention.
    """

    layer: str
    case: str
    milliseconds: float
    reached: float
    of: float

    @property
    def share(self) -> float:
        """Return the fraction of the reference that was reached."""
        return self.reached / self.of


def decode(layer: str, sequences: int, context: int, bandwidth: float) -> Row:
    """Measure one decode token of each sequence."""
    shape = LAYERS[layer]
    took = median_ms(paged_attention(shape, [1] * sequences, [context] * sequences, BLOCK, DEVICE), DEVICE)
    read = 2 * 2 * sequences * context * shape.kv_heads * shape.head_dim
    return Row(layer, f"decode {sequences} × {context} ({read >> 20} MiB)", took, read / took / 1e6, bandwidth)


def prefill(layer: str, length: int) -> Row:
    """Measure the prefill of one whole prompt."""
    shape = LAYERS[layer]
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    took = median_ms(paged_attention(shape, [length], [length], BLOCK, DEVICE), DEVICE)
    shapes = ((heads, length, size), (kv_heads, length, size), (kv_heads, length, size))
    q, k, v = (torch.randn(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    torch_ms = median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), DEVICE)
    operations = 2 * heads * length * length * size  # the causal mask halves the scores
    return Row(layer, f"prefill {length}", took, operations / took / 1e9, operations / torch_ms / 1e9)


def main() -> int:
    """Print the table. Return exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py: no GPU found", file=sys.stderr)
        return 2
    rows, bandwidth = [], copy_bandwidth(DEVICE)
    for layer in LAYERS:
        cases = [(1, 32768), (8, 8192), (64, 2048), (64, 16384), (256, 1024)]
        rows += [decode(layer, sequences, context, bandwidth) for sequences, context in cases]
        rows += [prefill(layer, length) for length in (512, 2048, 8192, 32768)]
    table = Table(title=f"{torch.cuda.get_device_name()}, a copy moves {bandwidth:.0f} GB/s")
    for name in ("layer", "case", "ms", "reached", "of", "share"):
        table.add_column(name, justify="left" if name in ("layer", "case") else "right")
    for row in rows:
        unit = "GB/s" if row.case.startswith("decode") else "TFLOP/s"
        table.add_row(
            row.layer,
            row.case,
            f"{row.milliseconds:.3f}",
            f"{row.reached:.0f} {unit}",
            f"{row.of:.0f}",
            f"{row.share:.2f}",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare Stoker's GPU attention with a device copy (decode) and torch's attention (prefill).

    python benchmarks/attention.py [--json FILE]

Targets: a decode that reads at least 256 MB of keys and values per layer reaches 90 % of the bandwidth of a copy; a
prefill reaches 80 % of torch's scaled_dot_product_attention, which uses cuDNN or FlashAttention on NVIDIA GPUs. Times
are medians of several runs, measured by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from stoker_engine.kernels.triton.attention.attention import paged_attention
from stoker_engine.kernels.triton.attention.decode_splits import PART_KEYS, decode_splits

RUNS, BLOCK = 15, 16

#: Layer shapes: query heads, KV heads, head size.
LAYERS = {"Llama-3-8B": (32, 8, 128), "Qwen3-0.6B": (16, 8, 128), "Gemma 3 1B": (4, 1, 256), "one KV head": (8, 1, 128)}


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


def median_ms(run: Callable[[], object]) -> float:
    """Return the median time of one call, in ms.

    The call is replayed as a CUDA graph, which excludes the host's time. The GPU's caches are flushed before each run.
    """
    return median_of(captured(run))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Capture the launches of `run` in a CUDA graph, and return its replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def median_of(run: Callable[[], object]) -> float:
    """Return the median time of `run` by CUDA events, in ms, with flushed caches."""
    trash, found = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for _ in range(RUNS):
        trash.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return float(statistics.median(found))


def copy_bandwidth() -> float:
    """Return the bandwidth of a 1 GiB copy in GB/s; reads and writes are both counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_of(lambda: target.copy_(source)) / 1e6  # not in a graph: copies are slower there


def attend(heads: int, kv_heads: int, size: int, lengths: list[int], context: list[int]) -> Callable[[], object]:
    """Return a launch in which sequence s computes its last `lengths[s]` tokens of a context of `context[s]`."""
    blocks = [-(-each // BLOCK) for each in context]
    cache = torch.randn(sum(blocks) + 1, 2, BLOCK, kv_heads, size, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros(len(context), max(blocks), dtype=torch.int32)
    numbers = iter((torch.randperm(sum(blocks)) + 1).tolist())
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([next(numbers) for _ in range(count)], dtype=torch.int32)
    tables = tables.cuda()
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    ends = torch.tensor(context, dtype=torch.int32, device="cuda")
    query = torch.randn(sum(lengths), heads, size, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    scale, num_parts = size**-0.5, sum(-(-each // PART_KEYS) for each in context)
    parts = decode_splits(ends, num_parts) if max(lengths) == 1 else (None, None)
    return lambda: paged_attention(
        query,
        cache[:, 0],
        cache[:, 1],
        None,
        None,
        tables,
        starts,
        ends,
        parts[0],
        parts[1],
        scale,
        None,
        None,
        None,
        None,
        out,
    )


def decode(layer: str, sequences: int, context: int, bandwidth: float) -> Row:
    """Measure one decode token of each sequence."""
    heads, kv_heads, size = LAYERS[layer]
    took = median_ms(attend(heads, kv_heads, size, [1] * sequences, [context] * sequences))
    read = 2 * 2 * sequences * context * kv_heads * size
    return Row(layer, f"decode {sequences} × {context} ({read >> 20} MiB)", took, read / took / 1e6, bandwidth)


def prefill(layer: str, length: int) -> Row:
    """Measure the prefill of one whole prompt."""
    heads, kv_heads, size = LAYERS[layer]
    took = median_ms(attend(heads, kv_heads, size, [length], [length]))
    shapes = ((heads, length, size), (kv_heads, length, size), (kv_heads, length, size))
    q, k, v = (torch.randn(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    torch_ms = median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
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
    rows, bandwidth = [], copy_bandwidth()
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

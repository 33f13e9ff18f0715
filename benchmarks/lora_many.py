"""Measure many LoRA adapters on one engine: cost of registration, and of loading adapters during steps.

    python benchmarks/lora_many.py [--registered 500] [--hot 50] [--minutes 10]

The adapters have rank 16 on all linear operations of Gemma 3 270M: 8 MB each. Requests choose among the hot ones at
random. Fewer fit into memory, so adapters are loaded all the time, while steps run. The table shows

    memory     resident: with the model alone, at the end of the run, and after removal of all adapters
    loads      time to load one adapter from files in the page cache
    steps      decode time per token, in steps with and without a concurrent load
    waits      seconds from a request's arrival to its first step: p99 of the slowest and of the median adapter
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from lora import bfloat16_model, save_adapter
from rich.console import Console
from rich.table import Table

from stoker_common.block_hash import CacheKeys
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.engine import Engine

RANK, DISTINCT = 16, 20  # DISTINCT: number of folders, which the adapters share
CLIENTS, PROMPT, DECODED = 16, 16, 24


def resident_bytes() -> int:
    """Return the resident memory of this process, without pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def quantile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registered", type=int, default=500)
    parser.add_argument("--hot", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    model = str(bfloat16_model("gemma"))
    with TemporaryDirectory() as folder:
        folders = [str(save_adapter(Path(folder) / f"{n}", model, RANK, n)) for n in range(DISTINCT)]
        run(model, folders, options.registered, options.hot, options.minutes * 60)


def run(model: str, folders: list[str], registered: int, hot: int, seconds: float) -> None:
    """Register the adapters, serve the hot ones, and remove all."""
    args = EngineArgs(
        model, device="cpu", dtype="bfloat16", max_model_len=256, max_num_seqs=CLIENTS, enable_lora=True, max_loras=8,
        max_cpu_loras=32, max_lora_rank=RANK, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 26,
    )  # fmt: skip
    sys.setswitchinterval(0.0005)  # as in the engine process
    engine, rng = Engine.from_args(args), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)

    def submit(number: int, adapter: int) -> None:
        prompt = [rng.randrange(1000, 40000) for _ in range(PROMPT)]
        keys = CacheKeys(root_key=b"%d" % adapter)
        engine.add(EngineRequest(f"{number}", prompt, params, DECODED, cache_keys=keys, adapter=adapter))

    for index in range(200):  # touches all blocks of the KV cache: each takes memory on first use
        engine.add(EngineRequest(f"base {index}", [5] * PROMPT, params, DECODED))
    while engine.has_work:
        engine.step()
    gc.collect()
    before, started = resident_bytes(), time.monotonic()
    checks = [engine.load_adapter(AdapterSource(n, f"{n}", folders[n % len(folders)])) for n in range(registered)]
    while not all(check.done() for check in checks):
        engine.step()
    registration = time.monotonic() - started

    loads, waits = list[float](), defaultdict[int, list[float]](list)
    alone, loading = list[float](), list[float]()
    adapter_of, number = dict[str, int](), 0
    for _ in range(CLIENTS):
        adapter_of[f"{number}"] = rng.randrange(hot)
        submit(number, adapter_of[f"{number}"])
        number += 1
    end, submitting = time.monotonic() + seconds, True
    while engine.has_work:
        started_at, is_loading = time.perf_counter(), engine.scheduler.adapters.is_loading
        outputs = engine.step()
        took = time.perf_counter() - started_at
        report = outputs.report
        if report is None:
            continue
        if report.stats.adapters is not None:
            loads += report.stats.adapters.load_seconds
        if report.num_tokens == report.num_new_tokens > 0 and not report.num_prompt_tokens:
            (loading if is_loading or engine.scheduler.adapters.is_loading else alone).append(took / report.num_tokens)
        for finished in report.finished:
            waits[adapter_of.pop(finished.id)].append(finished.queue or 0.0)
            if submitting := submitting and time.monotonic() < end:
                adapter_of[f"{number}"] = rng.randrange(hot)
                submit(number, adapter_of[f"{number}"])
                number += 1
    during = resident_bytes()
    for adapter in range(registered):
        engine.remove_adapter(adapter)
    while engine.has_work:
        engine.step()
    gc.collect()
    after = resident_bytes()

    slowest = {adapter: quantile(times, 0.99) for adapter, times in waits.items()}
    table = Table("what", "value", title=f"{registered} registered, {hot} hot, {seconds:.0f} s, {number} requests")
    table.add_row("registration of one adapter", f"{registration / registered * 1e3:.1f} ms")
    mebibytes = " / ".join(f"{each / (1 << 20):.0f}" for each in (before, during, after))
    table.add_row("memory before / at the end / adapters removed", f"{mebibytes} MiB ({after / before:.3f} of before)")
    table.add_row(
        "loads", f"{len(loads)}: median {statistics.median(loads) * 1e3:.1f}, p99 {quantile(loads, 0.99) * 1e3:.1f} ms"
    )
    table.add_row(
        "decode time per token without / with loads, p50",
        f"{statistics.median(alone) * 1e3:.2f} / {statistics.median(loading) * 1e3:.2f} ms",
    )
    ratio = quantile(loading, 0.99) / quantile(alone, 0.99)
    table.add_row(
        "the same, p99", f"{quantile(alone, 0.99) * 1e3:.2f} / {quantile(loading, 0.99) * 1e3:.2f} ms ({ratio:.2f})"
    )
    worst, middle = max(slowest.values()), statistics.median(slowest.values())
    table.add_row(
        "waits: slowest adapter's p99 / the median one's", f"{worst:.3f} / {middle:.3f} s ({worst / middle:.2f})"
    )
    Console(width=140).print(table)
    engine.shutdown()


if __name__ == "__main__":
    main()

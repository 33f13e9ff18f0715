"""What could be wrong in the CPU benchmark without showing: sums, medians, comparisons, wrong numbers of tokens."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cpu import __main__ as bench
from cpu import current, history, restrict, rounds
from cpu.engines.engine import Finished, check_counts
from cpu.environments import CannotRunError, once, steps_into
from cpu.models import Model, bytes_of, bytes_read, parameters
from cpu.report import report
from cpu.results import Results, Row
from cpu.roofline import least
from cpu.wait_idle import IdleWaiter
from cpu.workloads import by_room, counted_tokens, expand, workload
from machine import Machine
from workloads import Workload

from stoker_engine.kernels.cpu.isa import isas

#: Reads 1,000 bytes a second, computes 10,000 operations.
MACHINE = Machine("a processor", 2, 1000, 10_000)
MODEL = Model("A", Path("-"), body=100, head=50, weight_bytes=300, context=64)


def results(*rows: Row) -> Results:
    return Results("2026-01-01 00:00", "abc", "a processor", 2, 1e9, 1e9, rows=list(rows))


def row(engine: str, *speeds: float, share: float = 0.5) -> Row:
    return Row("A", "W1", engine, "1", list(speeds), [share] * len(speeds), "memory")


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUID is an instruction of x86")

#: Returns one of the eight words of CPUID's leaf 7, subleaves 0 and 1.
LEAF_7 = """
#include <cpuid.h>
unsigned leaf_7(int number) {
    unsigned words[4];
    __cpuid_count(7, number / 4, words[0], words[1], words[2], words[3]);
    return words[number % 4];
}
"""


class Pretended:
    """An engine that takes a second and gives each request `short` tokens too few."""

    version = "1"

    def __init__(self, short: int = 0) -> None:
        self.short, self.seen = short, list[Workload]()

    def run(self, workload: Workload) -> Finished:
        self.seen.append(workload)
        return Finished(1.0, [out - self.short for _, out in workload.requests])

    def close(self) -> None: ...


def test_workloads_match_their_names() -> None:
    names = expand(["W1", "W2", "W3", "decode", "prefill", "long"])
    made = {name: workload(name, seed=0) for name in names}
    assert made["decode-16"].num_output_tokens == 16 * 64
    assert counted_tokens(made["prefill-1024"]) == 1024
    assert counted_tokens(made["W2"]) == 2419
    assert workload("decode-1", 0) == workload("decode-1", 0) != workload("decode-1", 1)
    together = by_room(names)
    assert sorted(name for _, some in together for name in some) == sorted(names) and len(together) == 2
    for room, some in together:
        assert all(room.holds(made[name]) and len(made[name].requests) <= room.at_once for name in some)
    assert not together[0][0].holds(made["prefill-4000"])
    assert by_room(["W1"]) == [(together[0][0], ["W1"])]
    assert expand(["decode-8", "decode"])[0] == "decode-8" and len(expand(["decode-8", "decode"])) == 6


def test_roofline_of_one_request_is_limited_by_reading_weights() -> None:
    needed = least(Workload("w", [([1, 2, 3], 4)]), MODEL)
    assert needed.bytes_read == 4 * 2 * 150
    assert needed.operations == 2 * (100 * (3 + 3) + 50 * 4)
    assert needed.ceiling(MACHINE) == "memory" and needed.seconds(MACHINE) == 1.2


def test_roofline_of_many_requests_is_limited_by_computing() -> None:
    needed = least(Workload("w", [([7] * 100 + [number], 1) for number in range(10)]), MODEL)
    assert needed.operations == 2 * (100 * (100 + 10) + 50 * 10)
    assert needed.ceiling(MACHINE) == "GEMM" and needed.seconds(MACHINE) == 2.3
    same = least(Workload("w", [([7, 7], 1), ([7, 7, 7], 1)]), MODEL)
    assert same.operations == 2 * (100 * 3 + 50 * 2)


@pytest.mark.parametrize("head", [True, False])
def test_parameters_are_counted_by_layer_and_head(tmp_path: Path, head: bool) -> None:
    shapes = {"model.embed_tokens.weight": [10, 4], "model.layers.0.mlp.up_proj.weight": [4, 6]}
    if head:
        shapes["lm_head.weight"] = [10, 4]
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert parameters(tmp_path) == (24, 40)


def test_bytes_of_quantized_weights_are_counted(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((10, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 18), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert bytes_read(tmp_path / "model.gguf") == 10 * 34 + 4 * 18
    quantized = replace(MODEL, name="A-q8_0", file=tmp_path / "model.gguf")
    assert (quantized.weights, MODEL.weights) == ("q8_0", "bf16")
    assert MODEL.folder_alone("vllm") == MODEL.folder
    with pytest.raises(CannotRunError, match="vllm was not tried with quantized"):
        quantized.folder_alone("vllm")


def test_bytes_of_a_quantized_folder_are_counted(tmp_path: Path) -> None:
    """By their size in the file; a head of its own leaves the embedding out."""
    weights = {
        "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4, dtype=torch.int8),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(6, 1),
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert parameters(tmp_path) == (6 * 4 + 6, 10 * 4)
    assert parameters(tmp_path, bytes_of) == (6 * 4 + 6 * 4, 10 * 4 * 2)
    save_file({**weights, "lm_head.weight": torch.zeros(10, 4)}, tmp_path / "model.safetensors")
    assert parameters(tmp_path, bytes_of) == (6 * 4 + 6 * 4, 10 * 4 * 4)


def test_medians_ratios_and_shares_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = row("stoker", 50, 10, 30)
    found = results(ours, row("slow", 20), row("fast", 60, 60))
    assert ours.speed == 30
    assert found.ratio("A", "W1") == 0.5
    assert results(ours).ratio("A", "W1") is None
    found.write(tmp_path / "file.json")
    assert Results.read(tmp_path / "file.json") == found
    text = report(found, [], "plot.svg")
    assert "| W1 | 30.0 (10.0–50.0) | 20.0 (20.0–20.0) | 60.0 (60.0–60.0) | 0.50 (fast) | 50% of memory | – |" in text


def test_history_compares_with_the_last_run_of_the_same_kind(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.change(row("stoker", 1), "a processor", history.read(path)) is None
    history.append(path, results(row("stoker", 30, share=0.4), row("other", 1, share=0.1)))
    history.append(path, results(row("stoker", 30, share=0.5)))
    lines = history.read(path)
    assert len(lines) == 3
    assert history.change(row("stoker", 9, share=0.45), "a processor", lines) == pytest.approx(-0.1)
    assert history.change(row("stoker", 9, share=0.45), "another", lines) is None
    assert history.change(row("third", 9), "a processor", lines) is None


def test_history_never_compares_with_runs_on_a_busy_machine(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    busy = row("stoker", 10, 10, 10, share=0.1)
    busy.noisy = 2
    history.append(path, results(row("stoker", 30, share=0.4)))
    history.append(path, results(busy))
    assert history.change(row("stoker", 9, share=0.6), "a processor", history.read(path)) == pytest.approx(0.5)


@pytest.mark.parametrize("counts", [[4, 3], [4], [4, 4, 4], []])
def test_wrong_number_of_tokens_yields_no_speed(counts: list[int]) -> None:
    asked = Workload("w", [([1], 4), ([1], 4)])
    check_counts(asked, Finished(1, [4, 4]))
    with pytest.raises(CannotRunError, match=r"^w: "):
        check_counts(asked, Finished(1, counts))


def test_engines_take_turns_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "measure", classmethod(lambda cls: MACHINE))
    good, same, short = Pretended(), Pretended(), Pretended(short=1)
    found = results()
    still = IdleWaiter(1, ticks=lambda: (0, 1), sleep=lambda _: None)
    running = {"stoker": good, "same": same, "short": short}
    rounds.measure(MODEL, running, ["W1", "decode-2"], 3, still, found)
    assert good.seen == same.seen and len(good.seen) == 2 + 2 * 3
    assert len({str(each.requests) for each in good.seen}) == len(good.seen)  # fresh in each round
    assert [(each.workload, each.engine, len(each.speeds), each.noisy) for each in found.rows] == [
        ("W1", "stoker", 3, 0), ("W1", "same", 3, 0), ("decode-2", "stoker", 3, 0), ("decode-2", "same", 3, 0),
    ]  # fmt: skip
    assert found.row("A", "W1", "stoker").speed == 128
    assert "1 of 1 requests" in found.left_out["short, model A"] and len(short.seen) == 3


def test_waiting_for_a_quiet_machine_ends() -> None:
    now = iter(range(1000))
    waited = list[float]()
    busy = IdleWaiter(2, ticks=lambda: (next(now),) * 2, sleep=waited.append)
    assert [busy.wait() for _ in range(20)] == [False] * 20
    assert len(waited) == 15 * 2 + 5  # and then a single look each time


def test_successful_builds_are_kept_and_failed_ones_are_not(tmp_path: Path) -> None:
    made = list[str]()
    for recipe in ("1", "1", "2"):
        once(tmp_path / "kept", recipe, lambda folder, step, recipe=recipe: made.append(recipe))
    assert made == ["1", "2"]
    command = [sys.executable, "-c", "raise SystemExit('no compiler')"]
    with pytest.raises(CannotRunError, match=r"a step failed, exit code 1: .*no compiler"):
        once(tmp_path / "failed", "1", lambda folder, step: step("a step", command))
    assert not (tmp_path / "failed").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "W1,W9"], "no workload 'W9'; there are W1, W2, W3, decode, prefill, long, or one of decode-1"),
        (["--peers", "tgi"], "no peer 'tgi'; there are openvino, llama.cpp, vllm, transformers"),
        (["--models", "C"], "no model 'C'; there are A, B, gemma"),
        (["--rounds", "0"], "'0' is not an integer of at least 1"),
    ],
)
def test_unknown_arguments_are_refused_with_the_known_values(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_lists_of_arguments_are_separated_by_spaces_or_commas() -> None:
    options = bench.parse(["--workloads", "W2 decode-8", "--peers", "none", "--models", "gemma,A"])
    assert (options.workloads, options.peers, options.models) == (["W2", "decode-8"], [], ["gemma", "A"])


def test_current_report_has_the_newest_run_of_each_workload(tmp_path: Path) -> None:
    old = results(row("stoker", 10), row("openvino", 5), replace(row("stoker", 7), workload="decode-16"))
    old.rows.append(replace(row("stoker", 6), workload="decode-2"))
    new = replace(results(row("stoker", 20), row("vllm", 8)), date="2026-01-02 00:00", commit="def")
    for name, run in (("old", old), ("new", new)):
        run.write(tmp_path / f"{name}.json")
    current.main(tmp_path / "cpu", [tmp_path / "new.json"])
    current.main(tmp_path / "cpu", [tmp_path / "old.json"])  # an older run replaces nothing
    merged = Results.read(tmp_path / "cpu.json")
    assert [(r.workload, r.engine, r.speed, r.run) for r in merged.rows] == [
        ("W1", "stoker", 20, "2026-01-02 00:00, def"),
        ("W1", "vllm", 8, "2026-01-02 00:00, def"),
        ("decode-2", "stoker", 6, "2026-01-01 00:00, abc"),
        ("decode-16", "stoker", 7, "2026-01-01 00:00, abc"),
    ]
    text = (tmp_path / "cpu.md").read_text()
    assert "| 2.50 (vllm) | 50% of memory | 2026-01-02 00:00, def |" in text and "change" not in text
    with pytest.raises(ValueError, match="one processor"):
        current.merge([old, replace(new, processor="another")])


@x86
def test_restricted_libraries_see_only_the_features_of_an_instruction_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that returns leaf 7 of CPUID is patched as an engine's would be."""
    environment = tmp_path / "engine"
    folder = environment / "lib" / "python3" / "site-packages"
    folder.mkdir(parents=True)
    source, library = tmp_path / "leaf.c", folder / "leaf.so"
    source.write_text(LEAF_7)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    [whole, restricted] = [], []
    for isa, words in (("1", whole), ("avx2", restricted)):
        monkeypatch.setenv("STOKER_NATIVE_KERNELS", isa)
        restrict.restrict(environment, ("*.so",), steps_into(tmp_path / "log"))
        program = f"import ctypes; f = ctypes.CDLL({str(library)!r}).leaf_7; print([f(i) for i in range(8)])"
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **restrict.variables(environment)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        words += [each & 0xFFFFFFFF for each in json.loads(run.stdout)]
    masks = [mask for subleaf in restrict.cleared("avx2") for mask in subleaf]
    assert masks[1] >> 16 & 1 and not masks[1] >> 5 & 1  # AVX-512 is excluded, AVX2 is not
    assert restricted == [word & ~mask for word, mask in zip(whole, masks, strict=True)]


@x86
@pytest.mark.parametrize("isa", restrict.RESTRICTIONS)
def test_an_instruction_set_keeps_what_it_needs(isa: str) -> None:
    [needs] = [each.needs for each in isas() if each.name == isa]
    masks = restrict.cleared(isa)
    for feature, (subleaf, register, bit) in restrict.FEATURES.items():
        assert (masks[subleaf][register] >> bit & 1) == (feature not in needs)
    avx2, this = (restrict.cleared(each) for each in ("avx2", isa))
    assert all(
        narrow & wide == wide
        for few, more in zip(avx2, this, strict=True)
        for narrow, wide in zip(few, more, strict=True)
    )
    assert (avx2 == this) == (isa == "avx2")


def test_engines_are_not_restricted_to_sets_that_cannot_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_NATIVE_KERNELS", "sse2")
    with pytest.raises(CannotRunError, match="sse2"):
        restrict.folder_name("openvino")

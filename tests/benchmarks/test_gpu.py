"""The GPU benchmark: bounds, goals, workloads, the report, parts that fail or take too long, a run on the CPU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from gpu_parts import requests
from gpu_parts.busy import BusyTime, covered
from gpu_parts.figures import Figure, Recorder
from gpu_parts.goals import GOALS, goal_of, reaches
from gpu_parts.mixture import Layer
from gpu_parts.models import Size
from gpu_parts.paged import _cache
from gpu_parts.registry import BY_NAME, PARTS, Part
from gpu_parts.report import Report, share
from gpu_parts.roofline import Roofline
from gpu_parts.scale import FULL, SMALL, TINY, Attention, Mixture, scale_for

ROOT = Path(__file__).parents[2]
COPY = Figure("machine/copy", "copy", 2600.0, "GB/s")
GEMM = Figure("machine/gemm-bf16", "GEMM", 780.0, "TFLOP/s")


def test_nano_vllm_requests_have_the_published_number_of_output_tokens() -> None:
    """nano-vllm's README states it for its benchmark."""
    lengths = requests.lengths(requests.nano_vllm(256, 1024))
    assert sum(output for _, output in lengths) == 133_966
    assert all(100 <= length <= 1024 for request in lengths for length in request)


def test_sharegpt_like_requests_have_the_means_that_are_stated() -> None:
    made = requests.sharegpt_like(1000, 1024)
    prompts, outputs = zip(*requests.lengths(made), strict=True)
    assert sum(prompts) / 1000 == pytest.approx(180, rel=0.1) and sum(outputs) / 1000 == pytest.approx(205, rel=0.1)
    assert min(prompts) >= 4 and max(prompts) <= 1024 and min(outputs) >= 4 and max(outputs) <= 1024
    assert made == requests.sharegpt_like(1000, 1024)


def test_requests_below_a_vocabulary_have_the_same_lengths() -> None:
    made = requests.equal(3, 50, 7)
    small = requests.below(made, 512)
    assert requests.lengths(small) == requests.lengths(made)
    assert all(token < 512 for prompt, _ in small for token in prompt)


def test_size_counts_the_weights_that_a_step_reads() -> None:
    """Llama 3 8B: 8.03 billion weights, of which the input embedding of 0.53 billion is not read."""
    big = Size("Llama-3-8B")
    assert big.weights("bf16") == pytest.approx(15.0e9, rel=0.001)
    assert big.weights("int4") == pytest.approx(6.979e9 * 4.125 / 8 + 1.051e9, rel=0.001)
    assert big.bytes_per_token == 2 * 2 * 8 * 128 * 32
    assert Size("Qwen3-0.6B").weights("bf16") == pytest.approx(2 * 0.596e9, rel=0.001)  # the embedding is the head


@pytest.mark.parametrize("seed", range(5))
def test_work_of_requests_equals_the_sum_over_their_steps(seed: int) -> None:
    rng, size = random.Random(seed), Size("tiny-Llama")
    lengths = [(rng.randint(1, 30), rng.randint(1, 20)) for _ in range(4)]
    read, flops = 7 * size.weights("bf16"), 0.0
    for prompt, output in lengths:
        flops += size.flops(prompt, 1, sum(range(1, prompt + 1)))
        for context in range(prompt + 1, prompt + output):
            read += context * size.bytes_per_token
            flops += size.flops(1, 1, context)
    assert size.of_requests(lengths, 7) == pytest.approx((read, flops))


def test_bound_is_the_longer_of_memory_and_arithmetic() -> None:
    roofline = Roofline.of([COPY, GEMM])
    step = Figure("a", "a step", 7.0, "ms", least_bytes=15.6e9, least_flops=1e12)
    assert roofline.bound(step) == pytest.approx(6.0)
    assert roofline.bound(replace(step, least_flops=7.8e12)) == pytest.approx(10.0)
    assert roofline.bound(replace(step, unit="tok/s", amount=64)) == pytest.approx(64 / 6e-3)
    assert share(step, 6.0) == pytest.approx(6 / 7) and share(replace(step, unit="tok/s"), 14.0) == 0.5


def test_bound_needs_the_speeds_that_it_depends_on() -> None:
    step = Figure("a", "a step", 7.0, "ms", least_bytes=1.0, least_flops=1.0, arithmetic="gemm-fp8")
    assert Roofline.of([COPY, GEMM]).bound(step) is None
    assert Roofline.of([]).bound(replace(step, least_flops=0.0)) is None
    assert Roofline.of([COPY]).bound(COPY) is None


def test_goals_are_relative_to_figures_of_the_same_run() -> None:
    bf16 = Figure("prompts/Llama-3-8B/bf16/2048", "", 30_000.0, "tok/s")
    fp8 = Figure("prompts/Llama-3-8B/fp8/2048", "", 40_000.0, "tok/s")
    assert goal_of(fp8, {}) is None
    goal = goal_of(fp8, {bf16.key: bf16})
    assert goal == pytest.approx(39_000) and reaches(fp8, goal)
    prefill = Figure("attention/prefill/8192/16", "", 1.2, "ms", peers={"torch": 1.1, "torch with cuDNN": 0.9})
    goal = goal_of(prefill, {})
    assert goal == pytest.approx(1.0) and not reaches(prefill, goal)
    assert goal_of(replace(prefill, peers={}), {}) is None
    decode = Figure("attention/decode/8x8192/16", "", 0.1, "ms", least_bytes=260e6)
    assert goal_of(decode, {COPY.key: COPY}) == pytest.approx(0.125)


def test_goals_have_keys_of_figures_of_the_full_scale() -> None:
    """The names of models, streams and lengths in keys are those of the scale."""
    scale = FULL
    keys = {f"steps/{scale.big}/{stored}/{n}" for stored in ("bf16", "int4", "fp8") for n in scale.streams}
    keys |= {f"prompts/{scale.big}/{stored}/{n}" for stored in ("bf16", "int4", "fp8") for n in scale.prompts}
    keys |= {f"nano-vllm/{scale.small}/bf16/{kind}" for kind in ("sync", "async")} | {f"sharegpt/{scale.big}/bf16"}
    keys |= {f"server/{scale.big}/start", f"server/{scale.big}/tpot", f"busy/{scale.small}/{scale.busy_streams}"}
    keys |= {f"attention/prefill/{length}/16" for length in scale.prefills}
    keys |= {f"attention/decode/{count}x{length}/16" for count, length in scale.decodes}
    keys |= {f"mixture/{scale.mixture.name}/{tokens}" for tokens in scale.mixture_tokens}
    assert set(GOALS) <= keys


def test_scale_follows_the_memory() -> None:
    assert scale_for(80 << 30) is FULL and scale_for(40 << 30) is FULL
    assert scale_for(24 << 30) is SMALL and scale_for(16 << 30) is SMALL


@pytest.mark.parametrize("seed", range(10))
def test_covered_time_counts_overlaps_once(seed: int) -> None:
    rng = random.Random(seed)
    intervals = [
        (start, start + rng.randint(0, 9)) for start in (rng.randint(0, 50) for _ in range(rng.randint(0, 12)))
    ]
    points = {point for start, stop in intervals for point in range(start, stop)}
    assert covered(intervals) == len(points)


def test_busy_time_records_steps_with_all_streams() -> None:
    value = torch.ones(64, 64)
    with BusyTime(torch.device("cpu"), 2, skipped=1, recorded=2) as busy:
        for count in (1, 2, 2, 1, 2, 2, 2):
            value @ value
            busy.step(count)
    assert busy.ms_per_step > 0


def test_busy_time_without_enough_steps_is_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="only 1 steps had 2 streams"),
        BusyTime(torch.device("cpu"), 2, skipped=1, recorded=2) as busy,
    ):
        busy.step(2)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_mixture_by_torch_computes_the_same_as_the_kernels(tokens: int) -> None:
    layer = Layer(Mixture("tiny", 64, 8, 2, 32, 1), torch.device("cpu"))
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    torch.testing.assert_close(layer.by_torch(x), layer.ours(x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("block_size", [16, 64])
def test_cache_of_attention_has_own_slots_for_each_token(block_size: int) -> None:
    lengths, contexts = [1, 5, 64], [1, 70, 64]
    _, metadata = _cache(Attention(4, 2, 32), lengths, contexts, block_size, torch.device("cpu"))
    (group,) = metadata.groups
    slots = group.slot_mapping.tolist()
    assert len(set(slots)) == len(slots) == sum(lengths) and min(slots) >= block_size  # block 0 is never used
    for row, (start, length, context) in enumerate(zip([0, 1, 6], lengths, contexts, strict=True)):
        for index in range(length):
            block, offset = divmod(context - length + index, block_size)
            assert slots[start + index] == group.tables[row, block] * block_size + offset
    used = [
        block
        for row, context in zip(group.tables.tolist(), contexts, strict=True)
        for block in row[: -(-context // block_size)]
    ]
    assert len(set(used)) == len(used)


def test_recorder_ignores_an_incomplete_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "figures.jsonl")
    assert recorder.read() == []
    figure = Figure("a", "a", 1.5, "ms", "settings", 1.0, 2.0, "gemm-fp8", 3.0, {"torch": 2.0})
    recorder.add(figure)
    recorder.add(replace(figure, key="b"))
    recorder.file.write_text(recorder.file.read_text()[:-5])
    assert recorder.read() == [figure]


def test_report_states_bounds_goals_and_settings(tmp_path: Path) -> None:
    step = Figure("steps/Llama-3-8B/bf16/1", "a step", 6.2, "ms", "its settings", least_bytes=13e9)
    report = Report("a GPU", [COPY, GEMM, step], {"machine": "done in 1 s"})
    assert report.line(step) == "a step: 6.2 ms (bound 5 (81%); goal ≤ 6.3 ✓)"
    report.write(tmp_path / "run")
    text = (tmp_path / "run.md").read_text()
    assert "| a step | 6.2 ms | 5 (81%) | ≤ 6.3 ✓ | – | its settings |" in text and "- machine: done in 1 s" in text
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["figures"][2]["bound"] == pytest.approx(5.0) and found["figures"][2]["goal"] == 6.3


def test_parts_have_unique_names_and_the_first_ones_need_no_model() -> None:
    assert len(BY_NAME) == len(PARTS)
    names = list(BY_NAME)
    assert names[0] == "machine" and all(
        names.index("models") < names.index(f"steps-{s}") for s in ("bf16", "int4", "fp8")
    )


def run_in(folder: Path) -> gpu.Run:
    return gpu.Run("tiny", folder, folder / "run", Report("a run"), time.monotonic() + 1000)


def test_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.part(BY_NAME["machine"], 0.0)
    assert run.report.parts["machine"].startswith("was ended after")
    assert json.loads((tmp_path / "run.json").read_text())["parts"] == run.report.parts


def test_part_that_fails_keeps_its_log_and_the_cause(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.part(replace(BY_NAME["machine"], name="no such part"), 1000.0)
    assert run.report.parts["no such part"].startswith("failed after")
    assert "invalid choice" in (tmp_path / "run.no such part.log").read_text()


def test_parts_without_time_or_package_are_left_out(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    missing = Part("peer-no_such_package", 10, BY_NAME["machine"].load)
    gpu.run_parts(run, [missing])
    run.ends = 0.0
    gpu.run_parts(run, [BY_NAME["attention"]])
    assert run.report.parts == {
        "peer-no_such_package": "left out: no_such_package is not installed",
        "attention": "left out: no time was left",
    }


def test_dry_run_measures_parts_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--parts=machine,attention,mixture"]
    done = subprocess.run(
        [*command, f"--output={tmp_path}/run", f"--folder={tmp_path}/models"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert all(outcome.startswith("done") for outcome in found["parts"].values()), found["parts"]
    keys = {figure["key"] for figure in found["figures"]}
    assert {"machine/copy", "machine/gemm-bf16", "attention/prefill/96/16", "mixture/tiny/5"} <= keys
    assert all(figure["value"] > 0 and figure["title"] for figure in found["figures"])
    assert len(keys) == len(found["figures"])


@pytest.mark.slow
def test_dry_run_measures_engines_and_a_server_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", "--seconds=280"]
    parts = "models,steps-bf16,steps-int4,steps-fp8,nano-vllm-async,nano-vllm-sync,server"
    done = subprocess.run(
        [*command, f"--parts={parts}", f"--output={tmp_path}/run", f"--folder={tmp_path}/models"],
        cwd=ROOT, capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert all(outcome.startswith("done") for outcome in found["parts"].values()), found["parts"]
    keys = {figure["key"] for figure in found["figures"]}
    assert {f"steps/{TINY.big}/{stored}/3" for stored in ("bf16", "int4", "fp8")} <= keys
    assert {f"sharegpt/{TINY.big}/bf16", f"nano-vllm/{TINY.small}/bf16/sync", f"server/{TINY.big}/tpot"} <= keys


def test_benchmark_without_a_gpu_says_how_to_run_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as error:
        gpu.choose_scale(None)
    assert error.value.code == 2 and "--dry-run" in capsys.readouterr().err

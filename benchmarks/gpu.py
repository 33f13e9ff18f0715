"""Measure Stoker on a GPU: steps, prompts, throughput, attention, experts and a server, beside bounds and goals.

    make bench-gpu                                           # all parts, in less than 6 minutes
    python benchmarks/gpu.py --parts machine,steps-bf16      # some parts
    python benchmarks/gpu.py --dry-run                       # all parts with tiny models on the CPU, as a test

Each part runs in a process of its own with a time limit. A figure is printed and written as soon as it is measured,
so a part that fails or hangs, a signal or the time limit loses no figure. A GPU with less than 36 GiB of memory is
measured with Llama-3.2-3B's shape instead of Llama-3-8B's. Parts: see `gpu_parts/registry.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from gpu_parts.context import Context
from gpu_parts.figures import Recorder
from gpu_parts.registry import BY_NAME, NEEDED, PARTS, Part
from gpu_parts.report import Report
from gpu_parts.scale import FULL, SMALL, TINY, Scale, model_folder, scale_for

RESULTS = Path(__file__).parent / "results"
SCALES = {"full": FULL, "small": SMALL, "tiny": TINY}
#: Seconds of a run, and the least that a part gets.
LIMIT_S, LEAST_S = 350.0, 10.0
#: Seconds between two looks at a part, and after SIGTERM until SIGKILL.
LOOK_S, GRACE_S = 0.2, 5.0


@dataclass
class Run:
    """A run of several parts.

    Attributes:
        folder: models and the file of figures.
        target: path of the results without suffix.
        ends: monotonic time at which the run ends.
    """

    scale_name: str
    folder: Path
    target: Path
    report: Report
    ends: float

    def part(self, part: Part, limit_s: float) -> None:
        """Run a part in a process of its own, and print its figures as they come."""
        command = [sys.executable, __file__, "--child", part.name, "--scale", self.scale_name, "--folder", self.folder]
        log, recorder = self.target.with_suffix(f".{part.name}.log"), Recorder(self.folder / "figures.jsonl")
        began = time.monotonic()
        with log.open("w") as output, _child([str(word) for word in command], output) as process:
            while True:
                is_over = process.poll() is not None
                self._update(recorder)
                if is_over or time.monotonic() > began + limit_s:
                    break
                time.sleep(LOOK_S)
            code = process.poll()
        self._update(recorder)
        took = time.monotonic() - began
        if code == 0:
            self.report.parts[part.name] = f"done in {took:.0f} s"
            log.unlink()
        else:
            what = f"was ended after {took:.0f} s" if code is None else f"failed after {took:.0f} s: {_last_line(log)}"
            self.report.parts[part.name] = f"{what} ({log.name})"
        print(f"  {self.report.parts[part.name]}", flush=True)
        self.report.write(self.target)

    def _update(self, recorder: Recorder) -> None:
        figures = recorder.read()
        news = figures[len(self.report.figures) :]
        if not news:
            return
        self.report.figures += news
        for figure in news:
            print(f"  {self.report.line(figure)}", flush=True)
        self.report.write(self.target)


@contextmanager
def _child(command: list[str], output: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own group during the block, and end the group afterwards."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"


def run_parts(run: Run, parts: list[Part]) -> None:
    """Run parts one after another until the time is over."""
    for part in parts:
        left = run.ends - time.monotonic()
        peer = part.name.removeprefix("peer-")
        if left < LEAST_S:
            run.report.parts[part.name] = "left out: no time was left"
            continue
        if peer != part.name and importlib.util.find_spec(peer) is None:
            run.report.parts[part.name] = f"left out: {peer} is not installed"
            continue
        print(f"{part.name} (at most {min(left, part.limit_s):.0f} s; {left:.0f} s are left)", flush=True)
        try:
            run.part(part, min(left, part.limit_s))
        except KeyboardInterrupt:
            run.report.parts[part.name] = "was interrupted"
            raise
        if part.name in NEEDED and not run.report.parts[part.name].startswith("done"):
            break


def title_of(scale: Scale) -> str:
    """Return the device and the versions."""
    import torch

    name = torch.cuda.get_device_name() if scale.device == "cuda" else "dry run on a CPU, whose values mean nothing"
    versions = [f"torch {torch.__version__}"]
    with suppress(importlib.metadata.PackageNotFoundError):
        versions.append(f"Triton {importlib.metadata.version('triton')}")
    return f"{name}, {', '.join(versions)}, {os.cpu_count()} CPUs, {datetime.now(UTC):%Y-%m-%d}"


def choose_scale(name: str | None) -> str:
    """Return the name of the scale: `name`, or by the GPU's memory. Exits with 2 without a GPU."""
    import torch

    if name == "tiny":
        return name
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: no GPU found; --dry-run runs all parts on the CPU", file=sys.stderr)
        raise SystemExit(2)
    by_memory = scale_for(torch.cuda.get_device_properties(0).total_memory)
    return name or next(key for key, scale in SCALES.items() if scale is by_memory)


def main() -> int:
    """Run the parts, and print where the results are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="all", help=f"comma-separated: {', '.join(BY_NAME)}; default: all")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="time limit of the run; default: %(default)s")
    parser.add_argument("--scale", choices=SCALES, help="sizes; default: by the GPU's memory")
    parser.add_argument("--dry-run", action="store_true", help="the scale tiny, which runs on the CPU")
    parser.add_argument("--output", type=Path, help="path of the results without suffix; default: in results/")
    parser.add_argument("--folder", type=Path, help="keep the models in this folder, and use those that are there")
    parser.add_argument("--child", choices=BY_NAME, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        scale = SCALES[options.scale]
        recorder = Recorder(options.folder / "figures.jsonl")
        BY_NAME[options.child].load()(Context(scale, options.folder, recorder))
        return 0
    chosen = list(BY_NAME) if options.parts == "all" else options.parts.split(",")
    if unknown := [name for name in chosen if name not in BY_NAME]:
        parser.error(f"unknown parts: {', '.join(unknown)}")
    began = time.monotonic()
    scale_name = choose_scale("tiny" if options.dry_run else options.scale)
    scale = SCALES[scale_name]
    signal.signal(signal.SIGTERM, _interrupt)
    target = options.output or RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M}-gpu"
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name in chosen]
    report = Report(title_of(scale))
    folder = options.folder or Path(tempfile.mkdtemp(dir=model_folder(scale), prefix="stoker-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.jsonl").unlink(missing_ok=True)
    try:
        run_parts(Run(scale_name, folder, target, report, began + options.seconds), parts)
    except KeyboardInterrupt:
        print("interrupted; the figures until now are kept", flush=True)
    finally:
        report.write(target)
        report.draw(target)
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(report.figures)} figures in {time.monotonic() - began:.0f} s: {target}.md, {target}.json")
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""``stoker quantize`` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...support.waiting import until
from .conftest import RUN


def test_a_folder_is_written_and_never_overwritten(command: Any, tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "new"
    words = (str(tiny_llama), "--to=int4", "--group-size=32", f"--output={target}")
    result = command("quantize", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{target}\n"
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert (target / "tokenizer.json").read_bytes() == (tiny_llama / "tokenizer.json").read_bytes()
    again = command("quantize", *words)
    assert again.returncode == 2
    assert f"--output: {target} exists" in again.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["--to=W4A16"], "--output: is required"),
        (["--output=X"], "--to: is required"),
        (["--to=int5", "--output=X"], "--to: 'int5' is not a supported output format; supported: W4A16, W4A16_ASYM"),
        (["--to=q4_0", "--output=X"], "convert_hf_to_gguf.py"),
        (["--to=W8A8", "--group-size=32", "--output=X"], "--group-size: this format has one scale for each row"),
        (["--to=q8_0", "--group-size=32", "--output=X"], "--group-size: is fixed for Q8_0"),
        (["--to=W4A16", "--output=X"], "--group-size: 128 does not divide the model's rows of 64"),
        (["--to=W4A16", "--output=X", "--groupsize=3"], "did you mean --group-size?"),
        (["--to=W4A16", "--output=X", "--revision=main"], "--revision"),
    ],
)
def test_invalid_arguments_are_refused_in_a_sentence(
    words: list[str], message: str, tiny_llama: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from stoker_engine.cli.quantize import main

    monkeypatch.chdir(tmp_path)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main([str(tiny_llama), *words]) == 2
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not list(tmp_path.iterdir())


def test_gguf_files_are_refused_for_other_formats(command: Any, demo_gguf: Path, tmp_path: Path) -> None:
    result = command("quantize", "demo://gemma-3-270m", "--to=W4A16", f"--output={tmp_path / 'new'}")
    assert result.returncode == 2
    assert "is a GGUF file, which can become q8_0" in result.stderr
    result = command("quantize", str(demo_gguf), "--to=q4_0", f"--output={tmp_path / 'new'}")
    assert result.returncode == 2
    assert ", but Q4_0 is requested" in result.stderr


#: Restores SIGINT: tests in a shell's background ignore it, and so would their children.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "


@pytest.mark.parametrize(
    "ending,name", [(signal.SIGTERM, "new.gguf"), (signal.SIGINT, "new.gguf"), (signal.SIGTERM, "new")]
)
def test_an_interrupted_export_leaves_no_file(
    ending: signal.Signals, name: str, demo_gguf: Path, tmp_path: Path
) -> None:
    """Neither a file nor a folder with one remains."""
    words = ["demo://gemma-3-270m", "--to=bf16", f"--output={tmp_path / name}"]
    argv = [sys.executable, "-c", HEARD + RUN.format(module="quantize"), *words]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        until(lambda: any(path.stat().st_size > 1 << 20 for path in tmp_path.rglob("*")) or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(ending)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + ending, stderr
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, sys, threading, time
from stoker_engine.cli import quantize

def export(args, name):
    threading.Thread(target=time.sleep, args=(60,)).start()
    os.kill(os.getpid(), {signum})
    time.sleep(60)

quantize._to_gguf = export
sys.exit(quantize.main(["model", "--to=q8_0", "--output=new"]))
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_export_waits_for_no_thread(ending: signal.Signals) -> None:
    """A thread that was being started aborted the process, since Python does not wait for such a thread."""
    argv = [sys.executable, "-c", HEARD + INTERRUPTED.format(signum=int(ending))]
    assert subprocess.run(argv, timeout=120).returncode == 128 + ending

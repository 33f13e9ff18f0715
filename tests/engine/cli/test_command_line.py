"""A wrong flag is reported in one sentence, with the closest valid flag."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.cli import bench, command_line, run_batch, serve
from stoker_engine.contract.argv import to_argv
from stoker_engine.contract.serve_args import ServeArgs


@pytest.mark.parametrize(
    "word, message",
    [
        ("--max-num-seq=4", "did you mean --max-num-seqs?"),
        ("--max_num_seqs=4", "it is spelled --max-num-seqs"),
        ("--compilation-config", "are automatic"),
        ("--swap-space", "recomputed"),
        ("--tool-parser-plugin", "choose one with --tool-call-parser"),
        ("--fully-sharded-loras", "chosen automatically"),
        ("--data-parallel-size-local=1", "use --nnodes and --node-rank"),
        ("--data-parallel-start-rank=1", "use --nnodes and --node-rank"),
        ("-dpl=1", "use --nnodes and --node-rank"),
        ("--data-parallel-address=10.0.0.1", "use --master-addr"),
        ("--data_parallel_rpc_port=1", "use --master-port"),
        ("--xyzzy", "unknown flag"),
        ("--no-enable-prefix-cachin", "did you mean --no-enable-prefix-caching?"),
    ],
)
def test_unknown_flags_are_reported_with_a_hint(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["m", word]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"stoker serve: {word.partition('=')[0]}")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--headless"], "--headless: node 0 serves the API"),
        (["--headless", "--node-rank=1"], "--node-rank: must be 0 to 0, as there is one node"),
        (["--nnodes=2", "--node-rank=1", "--headless"], "--master-addr: is required with several nodes"),
        (["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"], "add --headless"),
        (["--nnodes=3", "--node-rank=1", "--master-addr=127.0.0.1", "--headless"], "--nnodes: 2 ranks "),
        (["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--headles"], "did you mean --headless?"),
    ],
)
def test_impossible_nodes_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["m", "--tensor-parallel-size=2", *words]) == 2
    assert message in capsys.readouterr().err


def test_all_existing_flags_are_accepted() -> None:
    parser = ServeArgs.parser()
    words = [
        "m",
        "--port=80",
        "--max-num-seqs",
        "4",
        "--no-enable-prefix-caching",
        "--api-key",
        "-looks-like-a-flag-but:",
    ]
    command_line.check_flags(parser, words)
    args = ServeArgs.from_argv(["m", "--chat-template={{ a }}--b", "--max-model-len", "8k"])
    command_line.check_flags(parser, args.to_argv())
    assert to_argv(args.engine)[-1] == "--max-model-len=8000"


def test_model_flag_and_short_flags_are_translated() -> None:
    assert command_line.with_model_flag(["-i", "x", "--model", "m", "--seed=1"]) == ["m", "-i", "x", "--seed=1"]
    assert command_line.with_model_flag(["--model=m"]) == ["m"]
    assert command_line.with_short_flags(["-i", "x", "-o", "-"], {"-i": "input", "-o": "output"}) == [
        "--input-file", "x", "--output-file", "-",
    ]  # fmt: skip


@pytest.mark.parametrize("piped", [False, True])
def test_a_batch_with_doubled_ids_is_refused_before_anything_runs(
    piped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["a", "b", None, "a", 5, 5, "b", "a"]
    lines = [*(json.dumps({"custom_id": custom_id}) for custom_id in ids), "[1]", "no JSON", "[" * 100_000, ""]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8-sig")
    sink.write_text("answers of before")
    with source.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert run_batch.main(["/no/model", "-i", "-" if piped else str(source), "-o", str(sink)]) == 2
    stderr = capsys.readouterr().err
    assert ("standard input" if piped else str(source)) in stderr
    assert "custom_id 'a' is on lines 1, 4, 8; 1 other ids are duplicated, too" in stderr
    assert sink.read_text() == "answers of before"


def test_a_batch_may_begin_with_a_byte_order_mark() -> None:
    result = asyncio.run(run_batch.answered(None, '\ufeff{"custom_id": "a"}'))
    assert result["custom_id"] == "a"
    assert result["error"]["message"].startswith("method must be POST")


def test_missing_arguments_and_files_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_batch.main(["m", "-o", "-"]) == 2
    assert "--input-file" in capsys.readouterr().err
    assert run_batch.main(["m", "-i", "/no/such/file", "-o", "-"]) == 2
    assert "/no/such/file" in capsys.readouterr().err
    assert serve.main(["m", "--chat-template=/no/such/file"]) == 2
    assert "--chat-template: cannot read /no/such/file" in capsys.readouterr().err
    assert bench.main(["throughput", "m", "--dataset-name=custom"]) == 2
    assert "--dataset-path" in capsys.readouterr().err
    assert bench.main(["troughput"]) == 2
    assert "did you mean throughput?" in capsys.readouterr().err


def test_help_comes_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for main, words, groups in (
        (serve.main, ["--help"], ["engine:", "HTTP server:"]),
        (run_batch.main, ["--help"], ["batch:", "engine:"]),
        (bench.main, ["throughput", "--help"], ["requests:", "data set:", "engine:"]),
        (bench.main, ["serve", "--help"], ["requests:", "data set:"]),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        text = capsys.readouterr().out
        assert all(group in text for group in groups)


def test_an_argument_error_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ArgumentError("--x", "no")

    assert command_line.run("stoker test", fail) == 2
    assert "--x: no\nTry 'stoker test --help'" in capsys.readouterr().err

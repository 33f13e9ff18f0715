from __future__ import annotations

import pytest

from stoker_common.command_parser import CommandParser


def parser() -> CommandParser:
    made = CommandParser(prog="stoker test")
    made.add_argument("--port", type=int, default=1)
    made.add_argument("--max-model-len", type=int)
    sub = made.add_subparsers().add_parser("create")
    sub.add_argument("--expires-in")
    return made


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--prot=8"], "unrecognized arguments: --prot=8; did you mean --port?"),
        (["--max_model_length=8"], "; did you mean --max-model-len?"),
        (["create", "--expire-inn", "1d"], "; did you mean --expires-in?"),
        (["--zzzzzz"], "unrecognized arguments: --zzzzzz\n"),
        (["create", "--port", "8"], "unrecognized arguments: --port 8"),
    ],
)
def test_unknown_flags_are_refused_with_a_similar_flag(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parser().parse_args(words)
    assert exit_info.value.code == 2
    assert hint in capsys.readouterr().err


def test_known_flags_are_parsed() -> None:
    options = parser().parse_args(["--port", "8", "create", "--expires-in", "1d"])
    assert (options.port, options.expires_in) == (8, "1d")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--port=x"], "stoker test: argument --port: invalid int value: 'x'\nTry 'stoker test --help'.\n"),
        (["create", "--expires-in"], "stoker test create: argument --expires-in: expected one argument\nTry 'stoker t"),
    ],
)
def test_errors_have_no_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parser().parse_args(words)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 2

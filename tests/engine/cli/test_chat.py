"""``stoker chat``: output and requests, with a scripted server."""

from __future__ import annotations

import io
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.cli import chat

EXAMPLE = Path(__file__).parents[3] / "examples" / "chat_tools.py"

Client = httpx.Client
Run = Callable[..., tuple[int, list[Any]]]


def calling(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the deltas of some calls, in pieces."""
    deltas: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in arguments]
    return deltas


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with these responses, each an error or a list of deltas; return its exit code and requests."""

    def run_chat(answers: list[list[dict[str, Any]] | httpx.Response], *words: str) -> tuple[int, list[Any]]:
        requests: list[Any] = []

        def answer(request: httpx.Request) -> httpx.Response:
            requests.append(json.loads(request.content))
            scripted = answers[len(requests) - 1]
            if isinstance(scripted, httpx.Response):
                return scripted
            events = [{"choices": [{"index": 0, "delta": delta}]} for delta in scripted]
            return httpx.Response(
                200, text="".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
            )

        monkeypatch.setattr(httpx, "Client", lambda **kwargs: Client(transport=httpx.MockTransport(answer), **kwargs))
        return chat.main(["--model-name=tiny", *words]), requests

    return run_chat


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_separators_are_text(run: Run, capsys: pytest.CaptureFixture[str], end: str) -> None:
    code, _ = run([[{"content": f"one{end}"}, {"content": f"{end}two"}]], "--quick=?")
    assert code == 0
    assert capsys.readouterr().out == f"one{end}{end}two\n"


def refusal(status: int, message: str) -> httpx.Response:
    """Return a server's error."""
    return httpx.Response(status, json={"error": {"message": message}})


@pytest.mark.parametrize(("words", "expected"), [([], 1024), (["--max-tokens=7"], 7), (["--max-tokens=0"], None)])
def test_length_of_answers_is_limited(run: Run, words: list[str], expected: int | None) -> None:
    _, [request] = run([[{"content": "hi"}]], "--quick=?", *words)
    assert request.get("max_tokens") == expected


def test_limit_beyond_the_context_is_omitted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    too_long = refusal(
        400, "this model's maximum context length is 512 tokens; the prompt has 9 and max_tokens is 1024"
    )
    code, requests = run([too_long, [{"content": "hi"}]], "--quick=?")
    assert (code, capsys.readouterr().out) == (0, "hi\n")
    assert requests == [{**requests[1], "max_tokens": 1024}, requests[1]]
    assert "max_tokens" not in requests[1]
    code, requests = run([refusal(400, "temperature must be at least 0")], "--quick=?")
    assert (code, len(requests)) == (1, 1)
    assert "temperature must be" in capsys.readouterr().err


def test_truncated_answer_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for finish_reason, expected in [("length", "--max-tokens"), ("stop", "")]:
        event = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": finish_reason}]}
        answer = httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        monkeypatch.setattr(httpx, "Client", lambda transport=transport, **rest: Client(transport=transport, **rest))
        assert chat.main(["--model-name=tiny", "--quick=?"]) == 0
        shown = capsys.readouterr()
        assert shown.out == "hi\n"
        assert expected in shown.err if expected else not shown.err


def test_missing_page_names_the_base_url(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run([httpx.Response(404, text="Not Found")], "--url=http://host/models", "--quick=?")
    assert code == 1
    assert "(http://host/models/chat/completions; the base URL of an API usually ends with /v1)" in (
        capsys.readouterr().err
    )


def test_tools_are_called_until_there_is_an_answer(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first = [
        {"role": "assistant", "content": ""},
        {"reasoning": "two "},
        {"reasoning": "sums"},
        *calling(("calculate", '{"expression": "(17 + 4) * 2"}'), ("calculate", '{"expression": "import os"}')),
    ]
    second = calling(("nobody", "{}"), ("calculate", "[1"))
    code, requests = run(
        [first, second, [{"content": "It is "}, {"content": "42."}]], "--quick=?", f"--tools={EXAMPLE}"
    )
    assert code == 0
    assert capsys.readouterr().out == "It is 42.\n", "without a terminal, only the answer is printed"
    assert [each["function"]["name"] for each in requests[0]["tools"]] == ["current_time", "calculate"]
    assert requests[0]["tools"][1]["function"]["parameters"]["required"] == ["expression"]
    messages = requests[2]["messages"]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "tool",
    ]
    assert messages[1]["reasoning"] == "two sums"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"expression": "(17 + 4) * 2"}'
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == ("c0", "42")
    assert all(message["content"].startswith("error: ") for message in (messages[3], *messages[5:]))


def test_a_terminal_shows_reasoning_and_calls_dimmed(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    answers = [[{"reasoning": "hm"}, *calling(("calculate", '{"expression": "1"}'))], [{"content": "1"}]]
    monkeypatch.delenv("NO_COLOR", raising=False)
    run(answers, "--quick=?", f"--tools={EXAMPLE}")
    shown = capsys.readouterr().out
    assert "\x1b[2mhm\x1b[0m" in shown
    assert "calculate(" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    run(answers, "--quick=?", f"--tools={EXAMPLE}")
    assert "\x1b" not in capsys.readouterr().out


def test_a_model_that_does_not_stop_calling_is_stopped(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, requests = run([calling(("calculate", '{"expression": "1"}'))] * 99, "--quick=?", f"--tools={EXAMPLE}")
    assert (code, len(requests)) == (1, chat.MAX_ROUNDS)
    assert "without answering" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal in which lines are typed."""

    def isatty(self) -> bool:
        return True


def type_in_terminal(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let input and output be a terminal in which `text` is typed."""
    monkeypatch.setattr("sys.stdin", Terminal(text))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


def test_too_many_tool_rounds_end_only_the_turn(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in_terminal(monkeypatch, "first\nsecond\n")
    calls = [calling(("calculate", '{"expression": "1"}'))] * chat.MAX_ROUNDS
    code, requests = run([*calls, [{"content": "two"}]], f"--tools={EXAMPLE}")
    assert (code, len(requests)) == (0, chat.MAX_ROUNDS + 1)
    assert requests[-1]["messages"] == [{"role": "user", "content": "second"}]
    captured = capsys.readouterr()
    assert "without answering" in captured.err
    assert "two" in captured.out


def test_without_a_terminal_only_answers_are_printed(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    code, requests = run([[{"content": "1"}], [{"content": "2"}]])
    assert (code, capsys.readouterr().out) == (0, "1\n2\n")
    assert [message["content"] for message in requests[1]["messages"]] == ["one", "1", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    code, requests = run([[{"content": "1"}], refusal(400, "no")])
    captured = capsys.readouterr()
    assert (code, len(requests), captured.out) == (1, 2, "1\n")
    assert captured.err == "stoker chat: the server returned 400: no\n"


def test_in_a_terminal_an_error_ends_only_the_turn(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in_terminal(monkeypatch, "first\nsecond\n")
    code, _ = run([refusal(400, "no"), [{"content": "2"}]])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "stoker chat: the server returned 400: no\n")
    assert captured.out == "chatting with tiny; Ctrl-D exits, Ctrl-C stops an answer\n> > 2\n> \n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], None), (["--stop", "\\nUser:", "end"], ["\nUser:", "end"]), (["--stop=a", "--stop=b\n"], ["a", "b\n"])],
)
def test_stop_texts_are_sent(run: Run, words: list[str], expected: list[str] | None) -> None:
    _, [request] = run([[{"content": "hi"}]], "--quick=?", *words)
    assert request.get("stop") == expected


@pytest.mark.parametrize(
    "source",
    [
        "async def f(): ...",
        "async def f(): yield",
        "def f(x, /): ...",
        "def f(*x): ...",
        "from typing import Callable\ndef f(g: Callable[[], int]): ...",
    ],
)
def test_unsupported_functions_are_refused_as_tools(tmp_path: Path, source: str) -> None:
    from stoker_engine.cli.chat_tools import Tools

    (tmp_path / "tools.py").write_text(f"{source}\ndef g(x: int): ...")
    with pytest.raises(ArgumentError, match=r"--tools: f\(\)"):
        Tools.of_file(str(tmp_path / "tools.py"))
    (tmp_path / "tools.py").write_text(f"{source.replace('def f', 'def _f')}\ndef g(x: int): ...")
    assert len(Tools.of_file(str(tmp_path / "tools.py")).definitions) == 1


@pytest.mark.parametrize("source", ["import os", "def f(x): 1 /", "def f(x: Nothing): ...", "import nothing_there"])
def test_files_without_valid_tools_are_refused(tmp_path: Path, source: str) -> None:
    from stoker_engine.cli.chat_tools import Tools

    (tmp_path / "tools.py").write_text(source)
    with pytest.raises(ArgumentError, match="--tools"):
        Tools.of_file(str(tmp_path / "tools.py"))


def test_the_example_tools_compute_results() -> None:
    names = runpy.run_path(str(EXAMPLE))
    assert names["calculate"]("-(1 + 2.5) * 2 / 7") == -1
    assert names["current_time"]("Asia/Tokyo")[-3] == ":"

"""Log lines of all programs have one format, whatever is logged."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stoker_common import logs
from stoker_engine import logs as engine_logs
from stoker_gateway.envoy.log_format import ENVIRONMENT, log_format
from stoker_gateway.envoy.process import envoy_binary
from stoker_operator.process import logs as operator_logs

Configure = Callable[[str], None]

PROGRAMS: dict[str, Configure] = {
    "engine": lambda format: engine_logs.configure(format, rank=3),
    "operator": lambda format: operator_logs.configure(format, "info"),
    "gateway": logs.configure,
}
HOSTILE = (
    'a "quoted" \\ backslash',
    "two\nlines",
    "\r\n2026-01-01T00:00:00.000Z info forged: line\r",
    "\x00\x07\x1b[31mred\x7f\x85\x9b",
    "line\u2028paragraph\u2029\u202ereversed",
    "half a pair \udcff and \ud83d",
    "é – 模型 😀",
    "x" * 100_000,
    '{"level": "info"}',
    "100% %s",
)
pytestmark = pytest.mark.usefixtures("restored_root_logger")
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
TEXT = re.compile(rf"({TIMESTAMP.pattern}) ([a-z]+) (\S+): (.*?)(?: \[(\S+=.*)\])?")


@pytest.fixture(params=PROGRAMS)
def configure(request: pytest.FixtureRequest) -> Configure:
    """Configure logging as a program does."""
    return PROGRAMS[request.param]


def assert_fields(line: dict[str, object], level: str) -> None:
    """Assert the fields of every line, in this order."""
    assert list(line)[:4] == ["timestamp", "level", "logger", "message"]
    assert_now(str(line["timestamp"]))
    assert line["level"] == level


def assert_now(timestamp: str) -> None:
    assert TIMESTAMP.fullmatch(timestamp)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(timestamp)) < timedelta(hours=1)


def read(text: str) -> str:
    """Return text as parsers do, with U+FFFD for an unpaired surrogate."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_logged_text_is_one_json_object(configure: Configure, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure("json")
    token = logs.request_id.set("r-1")
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("stoker_a").exception("%s", text, extra={"field": text, "not_a_number": float("nan"), "n": 2})
    finally:
        logs.request_id.reset(token)
    written = capfd.readouterr().err
    assert written.count("\n") == 1 and written.isascii()
    line = json.loads(written, parse_constant=pytest.fail)
    assert_fields(line, "error")
    assert (line["logger"], line["message"], line["request_id"]) == ("stoker_a", read(text), "r-1")
    assert (line["field"], line["not_a_number"], line["n"]) == (read(text), "nan", 2)
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith(f"ValueError: {read(text)}")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_logged_text_is_one_text_line(configure: Configure, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure("text")
    token = logs.request_id.set("r-1")
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("stoker_a").exception("%s", text)
    finally:
        logs.request_id.reset(token)
    first, *traceback = capfd.readouterr().err.rstrip("\n").split("\n")
    match = TEXT.fullmatch(first)
    assert match is not None
    assert_now(match[1])
    assert match.groups()[1:3] == ("error", "stoker_a")
    assert "request_id=r-1" in match[5]
    assert match[4].isprintable()
    if text.isprintable():
        assert match[4] == text
    assert traceback and all(line.startswith("  ") for line in traceback)


def test_log_lines_name_the_process_the_request_and_the_endpoint(capfd: pytest.CaptureFixture[str]) -> None:
    extra = {"namespace": "default", "endpoint": "demo", "request_id": "r-2", "detail": 1, "level": "forged", "rank": 9}
    for format in ("text", "json"):
        logs.configure(format, labels={"engine": 1, "rank": 0})
        logging.getLogger("stoker_a").warning("%d%% of memory", 97, extra=extra)
        logging.getLogger("other").warning("theirs", extra={"settings": object(), "endpoint": "x"})
    text, theirs, *lines = capfd.readouterr().err.rstrip("\n").split("\n")
    labels = "engine=1 rank=0 namespace=default endpoint=demo request_id=r-2"
    assert text.endswith(f" warning stoker_a: 97% of memory [{labels}]")
    assert theirs.endswith(" warning other: theirs [engine=1 rank=0]")
    ours, others = map(json.loads, lines)
    assert ours.pop("timestamp")
    assert ours == {
        "level": "warning",
        "logger": "stoker_a",
        "message": "97% of memory",
        "request_id": "r-2",
        "engine": 1,
        "rank": 0,
        "namespace": "default",
        "endpoint": "demo",
        "detail": 1,
    }
    assert others.keys() == {"timestamp", "level", "logger", "message", "engine", "rank"}


@pytest.mark.parametrize("format", ["text", "json"])
def test_envoys_lines_have_the_same_fields(format: str, tmp_path: Path) -> None:
    """Envoy's real program logs an invalid configuration."""
    for number, text in enumerate(HOSTILE[:5]):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({text: 1}, ensure_ascii=False), encoding="utf-8")
        words = ("-c", str(file), "--disable-hot-restart", "--log-format", log_format(json=format == "json"))
        environment = {**os.environ, "TZ": "Asia/Tokyo", **ENVIRONMENT}
        ended = subprocess.run(
            [envoy_binary(), *words], env=environment, stderr=subprocess.PIPE, timeout=60, check=False
        )
        lines = [line for line in ended.stderr.decode().split("\n") if "initializing config" in line]
        assert len(lines) == 1, ended.stderr
        if format == "json":
            line = json.loads(lines[0])
            assert_fields(line, "critical")
            assert line["logger"] == "envoy.main"
        else:
            match = TEXT.fullmatch(lines[0])
            assert match is not None
            assert_now(match[1])
            assert match.groups()[1:3] == ("critical", "envoy.main")


def test_timestamps_are_utc_with_milliseconds() -> None:
    assert logs.rfc3339(0) == "1970-01-01T00:00:00.000Z"
    chance = random.Random(0)
    for _ in range(100):
        seconds = chance.randrange(2**32) + chance.randrange(1000) / 1000
        written = logs.rfc3339(seconds)
        assert TIMESTAMP.fullmatch(written)
        assert abs(datetime.fromisoformat(written).timestamp() - seconds) <= 0.001001


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("gateway --endpoint m=http://127.0.0.1:9 --port 0 --billing-log /nonexistent/log", "/nonexistent/log"),
        ("serve /nonexistent/model --port 0", "/nonexistent/model"),
        ("operator --policy /nonexistent/policy", "/nonexistent/policy"),
    ],
    ids=["gateway", "engine", "operator"],
)
@pytest.mark.parametrize("format", ["json", "text"])
def test_reason_of_an_exit_has_the_format_of_other_lines(command: str, reason: str, format: str) -> None:
    stoker = Path(sys.executable).with_name("stoker")
    done = subprocess.run(
        [stoker, *command.split(), "--log-format", format], capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if format == "text":
        assert f"stoker {command.split()[0]}: " in done.stderr and reason in done.stderr
        return
    lines = [json.loads(line) for line in done.stderr.strip("\n").split("\n")]
    assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in lines)
    (last,) = [line for line in lines if line["message"].startswith(f"stoker {command.split()[0]}: ")]
    assert last["level"] == "error" and reason in last["message"]

"""Log lines, for people and for machines."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from stoker_operator.process.logs import JSONFormatter, TextFormatter


def record(message: str, *arguments: object, error: bool = False, **extra: str) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "stoker_operator.reconcile.apply", "levelname": "INFO", "msg": message, "args": arguments, **extra}
    )
    if error:
        try:
            raise ValueError("oh")
        except ValueError:
            made.exc_info = sys.exc_info()
    return made


def test_text_says_what_it_is_about() -> None:
    about = TextFormatter().format(record("%s created", "Service", namespace="default", endpoint="demo"))
    assert about.endswith(" INFO stoker_operator.reconcile.apply: default/demo: Service created")
    about_none = TextFormatter().format(record("100%% sure"))
    assert about_none.endswith(" INFO stoker_operator.reconcile.apply: 100%% sure")


def test_text_keeps_a_traceback() -> None:
    lines = TextFormatter().format(record("bad", error=True, namespace="default", endpoint="demo")).splitlines()
    assert lines[0].endswith("default/demo: bad")
    assert lines[-1] == "ValueError: oh"


@pytest.mark.parametrize("error", [False, True])
def test_json_is_one_object_a_line(error: bool) -> None:
    text = JSONFormatter().format(record("two\nlines – %d", 7, error=error, namespace="default", endpoint="demo"))
    assert "\n" not in text
    line = json.loads(text)
    exception = line.pop("exception", "")
    assert exception.endswith("ValueError: oh") is error
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "stoker_operator.reconcile.apply",
        "message": "two\nlines – 7",
        "namespace": "default",
        "endpoint": "demo",
    }
    assert "namespace" not in json.loads(JSONFormatter().format(record("of nobody")))

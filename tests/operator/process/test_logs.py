"""The operator's log lines name their endpoint."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from stoker_operator.objects.facts import Key
from stoker_operator.process import logs

pytestmark = pytest.mark.usefixtures("restored_root_logger")


@pytest.mark.parametrize("format", ["text", "json"])
def test_log_lines_name_the_endpoint(format: str, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure(format, "info")
    logger = logging.getLogger("stoker_operator.reconcile.apply")
    logger.info("%s created", "Service", extra=Key("default", "demo").reference)
    logger.info("100% sure")
    logger.info("of a namespace", extra=Key("default", "").reference)
    logger.debug("not written")
    logging.getLogger("kopf.objects").info("an event")
    no_events = SimpleNamespace(posting=SimpleNamespace(enabled=False, loggers=True, level=logging.INFO))
    logging.getLogger("kopf.objects").warning("kopf's", extra={"k8s_ref": {}, "settings": no_events})
    lines = capfd.readouterr().err.rstrip("\n").split("\n")
    if format == "text":
        name = "info stoker_operator.reconcile.apply:"
        assert [line.partition(" ")[2] for line in lines] == [
            f"{name} Service created [namespace=default endpoint=demo]",
            f"{name} 100% sure",
            f"{name} of a namespace [namespace=default]",
            "warning kopf.objects: kopf's",
        ]
        return
    about, about_none, about_namespace, kopfs = map(json.loads, lines)
    assert (about["namespace"], about["endpoint"], about["message"]) == ("default", "demo", "Service created")
    assert about_none.keys() == {"timestamp", "level", "logger", "message"}
    assert about_namespace.keys() == {*about_none, "namespace"}
    assert kopfs.keys() == about_none.keys()

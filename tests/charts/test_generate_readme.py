"""The tables of the chart's README list each value with its comment and default."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

generate = runpy.run_path(str(Path(__file__).parents[2] / "charts" / "generate_readme.py"))

VALUES = """\
# A chapter's introduction, apart from the values.

# Pods. A pipe is
# written as a|b.
replicas: 2
# One address.
gateway:
  # Whether to install it.
  enabled: false
  tls:
    # Peers.
    from:
    - {name: keda}
  # Limits.
  limits: {memory: 2Gi}
  # Port.
  port: null
# Settings.
env: []
#  - {name: HTTPS_PROXY}
# Level.
level: "info"
"""


def test_tables_list_values_by_section() -> None:
    head = ["| value | default | description |", "|---|---|---|"]
    assert generate["values_tables"](VALUES).split("\n") == [
        "## General",
        "",
        *head,
        "| `replicas` | `2` | Pods. A pipe is written as a\\|b. |",
        "| `env` | `[]` | Settings. |",
        '| `level` | `"info"` | Level. |',
        "",
        "## gateway",
        "",
        "One address.",
        "",
        *head,
        "| `gateway.enabled` | `false` | Whether to install it. |",
        '| `gateway.tls.from` | `[{"name": "keda"}]` | Peers. |',
        '| `gateway.limits` | `{"memory": "2Gi"}` | Limits. |',
        "| `gateway.port` | `null` | Port. |",
        "",
    ]


def test_value_without_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"gateway\.port has no comment"):
        generate["values_tables"](VALUES.replace("  # Port.\n", ""))

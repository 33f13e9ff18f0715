"""Temporary namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator

from kit.cluster import Cluster

#: Whether the tests' objects are kept for inspection.
KEEP = bool(os.environ.get("KEEP"))


@contextlib.contextmanager
def fresh(cluster: Cluster, title: str) -> Iterator[str]:
    """Create a namespace named after `title`; delete it afterwards, unless `KEEP` is set."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    name = f"{words}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        if not KEEP:
            _delete(cluster, name)


def _delete(cluster: Cluster, name: str) -> None:
    # The short grace period cuts the pods' drain, so that the next test has the CPUs to itself.
    cluster.kubectl("delete", "inferenceendpoints", "--all", "--namespace", name, "--ignore-not-found", check=False)
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=1", "--wait=false", check=False)

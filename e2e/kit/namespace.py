"""A namespace for a while."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator

from kit.cluster import Cluster

#: What tests made stays, for a look.
KEEP = bool(os.environ.get("KEEP"))


@contextlib.contextmanager
def fresh(cluster: Cluster, title: str) -> Iterator[str]:
    """A new namespace, called after `title`; deleted afterwards."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    name = f"{words}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    if not KEEP:
        # Its pods' drain is not worth waiting for, and the next test has the processors to itself.
        cluster.kubectl("delete", "inferenceendpoints", "--all", "--namespace", name, "--ignore-not-found", check=False)
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=1", "--wait=false", check=False)

"""``stoker operator`` where a name has the addresses that a file lists, as from a cluster's DNS.

Tests start it.
The environment names both: ``NAMED_HOST`` and ``NAMED_FILE``, with an address a line.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from stoker_operator.cli.operator import main

_resolve = socket.getaddrinfo


def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
    """`socket.getaddrinfo`, with the name in addition."""
    if host != os.environ["NAMED_HOST"]:
        return _resolve(host, *arguments, **options)
    addresses = Path(os.environ["NAMED_FILE"]).read_text().split()
    return [found for address in addresses for found in _resolve(address, *arguments, **options)]


if __name__ == "__main__":
    socket.getaddrinfo = resolve
    sys.exit(main(sys.argv[1:]))

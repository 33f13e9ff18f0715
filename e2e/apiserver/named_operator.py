"""``stoker operator`` with a DNS name that resolves to the addresses in a file, as in a cluster; tests start it.

Environment: ``NAMED_HOST`` is the name, ``NAMED_FILE`` the file, with one address per line.
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
    """`socket.getaddrinfo` that also knows the name."""
    if host != os.environ["NAMED_HOST"]:
        return _resolve(host, *arguments, **options)
    addresses = Path(os.environ["NAMED_FILE"]).read_text().split()
    return [found for address in addresses for found in _resolve(address, *arguments, **options)]


if __name__ == "__main__":
    socket.getaddrinfo = resolve
    sys.exit(main(sys.argv[1:]))

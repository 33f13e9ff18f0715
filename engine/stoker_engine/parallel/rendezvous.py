"""The rendezvous of ranks on several machines: a `TCPStore` of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C._distributed_c10d import TCPStore

from stoker_engine.nodes.addresses import listen


@contextlib.contextmanager
def rendezvous_at(address: str) -> Iterator[str]:
    """Serve a store at a free port. Yield its URL for processes that reach this machine by `address`; see
    `parallel.torch_communicator.World`.

    Raises:
        OSError: no port can be opened.
    """
    listening = listen(address, 0)
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    yield f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
    del store  # closes its port

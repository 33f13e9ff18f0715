"""Where ranks of several machines find each other: a store of torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C._distributed_c10d import TCPStore

from stoker_engine.nodes.addresses import listen


@contextlib.contextmanager
def rendezvous_at(address: str) -> Iterator[str]:
    """A URL for processes that can connect to this machine by `address`, at a port that is free; see
    `parallel.torch_communicator.World`.

    Raises:
        OSError: it cannot listen.
    """
    listening = listen(address, 0)
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    yield f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
    del store  # which listens no more

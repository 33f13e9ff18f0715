"""What we use of uvicorn beyond what it documents, all of it, and what for.

uvicorn may change any of these without a word. A test compares the tables with our code and with uvicorn's: it fails
where uvicorn has changed one, where our code uses another, and where one is no longer used.

- `Server`: our `main_loop` ends when there is a reason to, and in steps (`engine/lifecycle.py`), where uvicorn's looks
  at a flag ten times a second and then closes all connections at once.
- `H11Protocol`: our connections have limits, and one that was refused ends at shutdown like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Of `uvicorn.Server`.
SERVER: Final[Mapping[str, str]] = {
    "main_loop": "overridden: serves until the engine dies or a signal comes, and goes the way out",
    "capture_signals": "overridden: signals wake the event loop",
    "should_exit": "set at the end of the way out",
    "server_state": "its `connections` are shut down when the server closes",
}

#: Of `uvicorn.protocols.http.h11_impl.H11Protocol`.
CONNECTION: Final[Mapping[str, str]] = {
    "conn": "h11's connection, replaced by one that limits headers",
    "cycle": "of a request that is refused while it is answered, which ends as if its client were gone",
    "client": "the peer's address, for the log",
    "transport": "the connection's; uvicorn sets it when the connection is made",
    "loop": "the event loop, for timers",
    "server_state": "its `default_headers` are a response's first: the date",
    "handle_events": "extended: which limits hold follows from what h11 has read",
    "send_400_response": "overridden: our errors, in JSON",
    "shutdown": "overridden where the connection was refused; else uvicorn's, which lets an answer end",
    "timeout_keep_alive": "how long an idle connection is kept: also one on which no request has come yet",
    "timeout_keep_alive_handler": "closes an idle connection",
    "timeout_keep_alive_task": "the timer of that",
    "_unset_keepalive_if_required": "stops it",
}

#: Of `uvicorn.protocols.http.h11_impl.RequestResponseCycle`.
CYCLE: Final[Mapping[str, str]] = {
    "response_complete": "whether the request has been answered",
    "disconnected": "the client is gone: nothing is written any more",
    "waiting_for_100_continue": "and no 100 Continue either",
    "message_event": "wakes whoever waits for the request's body",
}

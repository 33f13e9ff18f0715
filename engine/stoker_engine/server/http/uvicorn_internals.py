"""All undocumented parts of uvicorn that this package uses, and their purpose.

uvicorn may change any of these without notice. A test compares the tables with this package and with uvicorn: it fails
if uvicorn changes a listed part, if the package uses an unlisted one, and if a listed one is no longer used.

- `Server`: `main_loop` waits for events and shuts down in stages (`engine/lifecycle.py`), whereas uvicorn polls a flag
  ten times a second and has no grace period. `startup` may listen later.
- `H11Protocol`: connections have limits, and a refused connection ends at shutdown like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Parts of `uvicorn.Server`: name → purpose.
SERVER: Final[Mapping[str, str]] = {
    "main_loop": "overridden: serves until the engine dies or a signal arrives, then shuts down in stages",
    "startup": "extended: loads the engines, and in a front end that replaces another one listens afterwards",
    "capture_signals": "overridden: signals wake the event loop",
    "should_exit": "set at the end of the shutdown",
    "server_state": "its `connections` are shut down when the server closes",
}

#: Parts of `uvicorn.protocols.http.h11_impl.H11Protocol`: name → purpose.
CONNECTION: Final[Mapping[str, str]] = {
    "conn": "h11's connection, replaced by one that limits headers",
    "cycle": "cycle of the current request; a request refused during its response ends as if the client had gone",
    "client": "address of the peer, for the log",
    "flow": "whether the transport has paused writing; parts of a body wait for it",
    "transport": "transport of the connection; uvicorn sets it when the connection is made",
    "loop": "event loop, for timers",
    "server_state": "its `default_headers` are the first headers of a response: the date",
    "handle_events": "extended: h11's state determines which limits apply",
    "send_400_response": "overridden: errors as JSON",
    "shutdown": "overridden for refused connections; else uvicorn's, which completes the current response",
    "timeout_keep_alive": "how long an idle connection is kept, also before its first request",
    "timeout_keep_alive_handler": "closes an idle connection",
    "timeout_keep_alive_task": "timer that calls `timeout_keep_alive_handler`",
    "_unset_keepalive_if_required": "stops the timer of an idle connection",
}

#: Parts of `uvicorn.protocols.http.h11_impl.RequestResponseCycle`: name → purpose.
CYCLE: Final[Mapping[str, str]] = {
    "response_complete": "whether the request has been answered",
    "disconnected": "the client is gone: nothing more is written",
    "waiting_for_100_continue": "suppresses 100 Continue",
    "message_event": "wakes the task that waits for the request's body",
}

"""Runs the engine in a separate process, so that it can never block the server's answers.

    server process                                   engine process
    AsyncLLM ─► EngineProcess ── requests, aborts ─► main: step loop ─► Engine
                     ▲ ▲ └──── outputs, a step at a time ─┘   │
                     │ └ /proc: does it run?                  │
                     └ heartbeat: since when is it busy? ◄────┘

Neither side polls: the engine sleeps on its inbox, the server on its socket. Each side detects the other's death by the
end of the pipe. The state of an engine that does not respond is read from shared memory.
"""

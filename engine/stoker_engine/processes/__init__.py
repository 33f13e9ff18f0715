"""Runs each engine in a separate process, so that it can never block the server's answers.

    server process                                   engine process
    AsyncLLM ─► EngineProcess ── requests, aborts ─► main: step loop ─► Engine
                     ▲ ▲ └──── outputs, a step at a time ─┘   │
                     │ └ /proc: does it run?                  │
                     └ heartbeat: since when is it busy? ◄────┘

Neither side polls for messages: the engine sleeps on its inbox, the server on its socket. Each side detects the other's
death by the end of the pipe. A stuck engine is detected by its heartbeat in shared memory.
"""

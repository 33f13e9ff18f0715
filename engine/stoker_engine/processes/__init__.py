"""The engine in a process of its own, so that nothing it does can stop the server from answering.

    server process                                   engine process
    AsyncLLM ─► EngineProcess ── requests, aborts ─► main: step loop ─► Engine
                     ▲ ▲ └──── outputs, a step at a time ─┘   │
                     │ └ /proc: does it run?                  │
                     └ status_word: since when is it busy? ◄──┘

Nobody polls: the engine sleeps on its inbox, the server on its socket. Each side notices the other's death by the end
of the pipe. What must be known of an engine that does not answer is read from memory that both share.
"""

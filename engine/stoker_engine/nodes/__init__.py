"""Several machines that serve a model together: who has which ranks, and how the others are reached from node 0.

    node 0 (the head)                                  node 1 (headless)
    engine process of an engine ── orders, news ────────► NodeAgent ── starts, ends, looks at ─┐
          Head                                                                              ▼
          RankExecutor ─────── steps, results ────────────────────────────────────────────► rank

The head of each engine listens. An agent connects to it, and once more for each rank that it is told to start: that
connection is the rank's pipe, and nobody stands between the two. Ranks reach each other by themselves.
"""

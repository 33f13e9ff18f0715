"""Multi-node serving: the placement of ranks, and the connections between node 0 and the other nodes.

    node 0 (the head)                                  node 1 (headless)
    engine process of an engine ◄── commands, reports ──► NodeAgent ── starts, kills, monitors ─┐
          Head                                                                                  ▼
          RankExecutor ◄────── steps, results ───────────────────────────────────────────────► rank

The head of each engine with ranks on other nodes listens. An agent connects to it, and opens another connection for
each rank that the agent starts. The rank gets this connection as its pipe, which leads directly to the executor. Ranks
connect to each other themselves.
"""

"""Layers of a decoder.

Layers that have a `forward` set ``__call__`` to it: nn.Module's own ``__call__`` checks for hooks, which costs a
microsecond about ten times per decoder layer.
"""

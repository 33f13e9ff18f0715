"""Layers of a decoder.

They set ``__call__`` to `forward`: nn.Module's own ``__call__`` checks for hooks, which costs a microsecond about ten
times per decoder layer.
"""

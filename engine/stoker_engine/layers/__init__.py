"""The parts a decoder is assembled from.

Each is called as its `forward`: nn.Module's own call looks for hooks, which takes a microsecond, ten times a layer.
"""

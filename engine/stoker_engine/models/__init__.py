"""Decoders assembled from parts; a family is a description plus its weight names."""

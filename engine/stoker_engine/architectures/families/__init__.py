"""Families of decoders: config.json → `DecoderConfig`, names of weights, GGUF metadata.

A family (`family.Family`) consists of a function from a config's fields to the decoder's parts, the defaults of fields
that a config may omit (those of transformers' config class; a test compares them), the names of weights in its files,
and the differences in its GGUF files.
"""

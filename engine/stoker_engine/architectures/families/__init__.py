"""All that is particular to each family of decoders: config.json → `DecoderConfig`, names of weights, GGUF metadata.

A family (`family.Family`) is a function from a config's fields to parts, the defaults that a config may leave unsaid
(those of transformers' config class; a test compares them), what its files call the weights, and what its GGUF files
state otherwise. All of it is torch-free. Families that differ in a flag share a function.
"""

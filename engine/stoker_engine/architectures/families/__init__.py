"""Which parts each family of decoders is made of: config.json → `DecoderConfig`.

A family is a function from a config's fields to parts, and the defaults that its files may leave unsaid (those of
transformers' config class; a test compares them). Families that differ in a flag share a function.
"""

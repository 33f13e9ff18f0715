"""Transformers backend: runs decoders without a native family as transformers modules, with Stoker's paged attention.

Transformers models call attention through an interface that selects an implementation by name. Stoker registers an
implementation that stores keys and values in the paged cache and attends with an `AttentionBackend`. The batch is
passed as one sequence [1, tokens] with the positions of its tokens, because only attention depends on other tokens.

    decoder   token ids, positions → hidden states, normalised        (`TransformersModel.forward`)
    head      hidden states → logits, with scale, soft cap …          (`TransformersModel.logits`)

The config does not fully describe what a model computes. So one token is run when a model is loaded, and models with
unsupported attention features are rejected with an error that names the feature.
"""

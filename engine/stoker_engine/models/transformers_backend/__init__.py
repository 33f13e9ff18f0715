"""Decoders that no family here describes, run by transformers' own modules on our paged attention.

transformers' models call attention through an interface, by the name of an implementation. Ours is one more: it keeps
keys and values in the paged cache and lets an `AttentionBackend` attend. The batch goes in as one flat sequence
[1, tokens] whose positions say where each token stands; nothing but attention looks at other tokens.

    decoder      token ids, positions → hidden states, normalised        (`TransformersModel.forward`)
    what follows hidden states → logits: head, scale, cap …              (`TransformersModel.logits`)

What a model does inside cannot be read off its config alone. So a first token is run before any request is served,
and whatever our attention would not compute as the model means it is refused by name.
"""

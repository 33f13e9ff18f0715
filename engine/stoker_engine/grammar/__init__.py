"""Structured outputs: the tokens that a grammar allows next. Torch-free.

token_table.py  the vocabulary as bytes, sent to the engine
grammars.py     cache of compiled grammars
matcher.py      the state of one sequence in its grammar
masks.py        bit masks of the allowed tokens of many sequences

The masks are computed by llguidance (https://github.com/guidance-ai/llguidance), imported at its first use.
"""

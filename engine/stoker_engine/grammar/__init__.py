"""Which tokens may come next where an output must look like something. Torch-free.

token_table.py  the vocabulary as bytes, on its way to the engine
grammars.py     compiled grammars, each made once
matcher.py      how far one sequence has come in its grammar
masks.py        which tokens each of many sequences may continue with

The masks are llguidance's (https://github.com/guidance-ai/llguidance), which is loaded when the first grammar comes.
"""

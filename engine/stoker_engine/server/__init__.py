"""The HTTP front end: OpenAI's and Anthropic's APIs over an engine client. Nothing here imports torch.

http  app  health  paths  unavailable   put together, and what all packages work with

connection/      bytes: bodies, clients that hang up
middleware/      what every request passes through
openai/, responses/, anthropic/: the APIs. Each makes a `ChatRequest` of its body, and writes the parts of the answer in
                 its own shape; none imports another
conversation/    a request of no API, and its run: from messages to the parts of an answer
parsers/         a model's output → those parts
fields/          types of fields that the bodies of several APIs share
errors/          what an error tells a client, and how each API writes it
engine/          the engine as the server sees it: prompts → one merged stream of deltas; loaded again, stopped
observability/   what the server says about itself: logs, metrics
"""

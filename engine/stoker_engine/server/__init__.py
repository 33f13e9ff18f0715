"""HTTP front end: OpenAI's and Anthropic's APIs over an engine client. No module here imports torch.

http  app  health  paths  unavailable   the application, and what all packages share
connection/      request bodies, disconnecting clients
middleware/      applied to every request
openai/, responses/, anthropic/: the APIs; none imports another. Each builds a `ChatRequest` from its body and writes
                 the parts of the answer in its own format
conversation/    API-independent request and its run: from messages to the parts of an answer
parsers/         model output → parts
fields/          field types shared by the bodies of several APIs
errors/          error descriptions, and their format in each API
engine/          the server's view of the engine: prompts → one merged stream of deltas; restarts and shutdown
observability/   access log, request log, throughput log
"""

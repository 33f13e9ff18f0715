"""HTTP front end: OpenAI's and Anthropic's APIs over an engine client. No module here imports torch.

app  health  paths  unavailable   the application, its probes, paths and errors
http/            the server process and its connections
front_ends/      several such processes that accept connections of one socket, and their supervisor
connection/      request bodies, disconnecting clients
middleware/      applied before the routes
openai/, responses/, anthropic/: the APIs; none imports another. Each builds a `ChatRequest` from the body of a chat,
                 and writes the parts of the answer in its own format
conversation/    API-independent requests, and their runs: from messages to the parts of an answer
parsers/         model output → parts
fields/          field types shared by the bodies of several APIs
errors/          error descriptions, and their format in each API
adapters/        served LoRA adapters
engine/          interface of the engine, admission, restarts and shutdown
observability/   access log, request log, throughput log
"""

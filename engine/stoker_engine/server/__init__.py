"""The HTTP front end: OpenAI's API over an engine client. Nothing here imports torch.

http_server  app  service  paths  unavailable       put together, and what all rooms work with

connection/      bytes: the HTTP/1.1 protocol, bodies, server-sent events, clients that are slow or hang up
middleware/      what every request passes through
openai/          the endpoints, and what goes in and out of them, by name
engine/          the engine as the server sees it: prompts → one merged stream of deltas; loaded again, stopped
observability/   what the server says about itself: health, logs, /metrics
"""

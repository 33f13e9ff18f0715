"""The HTTP front end: OpenAI's API over an engine client.

http_server                     the socket, the signals, the exit code
app                             routes and error handling, put together
completions  chat               endpoints that generate ...
models  health                  ... and those that tell
body  requests  unbuilt         what comes over the wire, checked by name
responses  sse  errors          what goes back
generation  disconnect          prompts → one merged stream of deltas, and what ends it early
service  engine_client          what all of them work with
"""

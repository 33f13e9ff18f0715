"""The HTTP front end: OpenAI's API over an engine client. Nothing here imports torch.

http_server  http_protocol  lifecycle           the socket, the connections, how the server stops
app                                             routes and error handling, put together
in_flight  api_keys  body_limit  request_id  http_metrics       what every request passes through
completions  chat  tokenization                 endpoints that work ...
models  health                                  ... and those that tell
body                                            reading what comes over the wire
sampled_request  completion_request  chat_request  messages  field_types  unbuilt       what it may say, by name
chat_prompt                                     conversations → prompts
admission  generation  disconnect               prompts → one merged stream of deltas, and what ends it early
responses  logprobs  sse  errors  unavailable   what goes back
request_log  throughput_log  access_log         what is logged
service  engine_client                          what all of them work with
"""

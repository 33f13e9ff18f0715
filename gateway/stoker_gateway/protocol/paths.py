"""The paths that clients may use, shared by Envoy's routes and by the picker's routing and accounting.

The paths in `POSTED` must match exactly. A variant that a server may accept, such as one with a trailing slash, is
rejected, because it would bypass the accounting.
"""

from __future__ import annotations

from typing import Final

MODELS: Final = "/v1/models"
#: The OpenAPI schema of a server.
SCHEMA: Final = "/openapi.json"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

#: Paths that generate text, so they use tokens and fill the prefix cache.
GENERATING: Final = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
#: Paths that use no tokens.
FREE: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
#: Paths whose requests are forms with a file, and whose responses are generated text.
FORMS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
#: Paths that Stoker's engine does not serve but other servers do. Their usage is never estimated: without usage in the
#: response it is 0.
OTHERS: Final = frozenset({"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"})
#: All paths for POST requests whose body names a model.
POSTED: Final = GENERATING | FREE | FORMS | OTHERS

#: Error message for all other paths.
NOT_SERVED: Final = (
    f"the gateway does not serve this path; paths of OpenAI's and Anthropic's APIs begin with /v1, such as {CHAT}"
)

#: Path segments that may follow the id of a response.
_OF_A_RESPONSE: Final = ("input_items", "cancel")


def response_id(path: str) -> str | None:
    """Return the response id in a path below /v1/responses, still percent-encoded; None for other paths."""
    prefix, _, tail = path.partition(f"{RESPONSES}/")
    name, slash, resource = tail.partition("/")
    return name if not prefix and name and (not slash or resource in _OF_A_RESPONSE) else None

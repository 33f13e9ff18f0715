"""The paths that clients reach: one list, by which Envoy routes and the picker decides, reserves and counts.

They are exact. A path that a server would take for one of these, as with a slash at its end, is none of them, since
what is counted by a path must not be reachable by another.
"""

from __future__ import annotations

from typing import Final

MODELS: Final = "/v1/models"
#: What paths and fields there are, as a server says.
SCHEMA: Final = "/openapi.json"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

#: Their answers cost tokens, even if they do not say how many; they compute a prompt, and so leave a prefix behind.
GENERATING: Final = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
#: They compute nothing.
FREE: Final = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
#: Their bodies are forms, with a file; their answers are text that is generated.
FORMS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
#: Of other servers; they cost what their answers say.
OTHERS: Final = frozenset({"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"})
#: To all of these a body is posted that names a model.
POSTED: Final = GENERATING | FREE | FORMS | OTHERS

#: What is asked of a response, after its id.
_OF_A_RESPONSE: Final = ("", "input_items", "cancel")


def response_id(path: str) -> str | None:
    """Which response a path below /v1/responses is about, as the path has it; None if it is no such path."""
    prefix, _, tail = path.partition(f"{RESPONSES}/")
    name, _, resource = tail.partition("/")
    return name if not prefix and name and resource in _OF_A_RESPONSE else None

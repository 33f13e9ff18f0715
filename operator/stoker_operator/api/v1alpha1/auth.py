"""Authentication of clients of the API."""

from __future__ import annotations

from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.references import SecretRef


class Auth(Part):
    """Authentication of clients of the OpenAI-compatible API."""

    api_keys_secret_ref: SecretRef
    """A Secret in the endpoint's namespace. Each value holds API keys, one per line, which clients send as bearer
    tokens; the entry's name identifies the client. Runtime vllm accepts one key only, from the entry api-key."""

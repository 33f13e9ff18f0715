"""Who may use the API."""

from __future__ import annotations

from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.references import SecretRef


class Auth(Part):
    """Who may use the API."""

    api_keys_secret_ref: SecretRef
    """A Secret of the endpoint's namespace whose values are the keys that clients send as a bearer token. Every entry
    of it is a key, and its name says whose it is; runtime vllm takes one key, from the entry api-key."""

"""stoker.dev/v1alpha1."""

from stoker_operator.api.v1alpha1.endpoint import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    InferenceEndpoint,
)
from stoker_operator.api.v1alpha1.spec import Spec

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "InferenceEndpoint", "Spec"]

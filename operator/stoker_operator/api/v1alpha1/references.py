"""References to Secrets and ConfigMaps in the endpoint's namespace, and to their keys."""

from __future__ import annotations

from stoker_operator.api.v1alpha1.base import DataKey, ObjectName, Part


class SecretRef(Part):
    """A Secret in the endpoint's namespace."""

    name: ObjectName
    """Name of the Secret."""


class SecretKeyRef(Part):
    """A key of a Secret in the endpoint's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: DataKey
    """Key in the Secret."""


class ConfigMapKeyRef(Part):
    """A key of a ConfigMap in the endpoint's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: DataKey
    """Key in the ConfigMap."""

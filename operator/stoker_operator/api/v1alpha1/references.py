"""Where values come from that the resource does not hold itself: keys of Secrets and ConfigMaps of its namespace."""

from __future__ import annotations

from stoker_operator.api.v1alpha1.base import DataKey, ObjectName, Part


class SecretRef(Part):
    """A Secret of the endpoint's namespace."""

    name: ObjectName
    """Name of the Secret."""


class SecretKeyRef(Part):
    """A key of a Secret in the endpoint's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: DataKey
    """Key whose value is taken."""


class ConfigMapKeyRef(Part):
    """A key of a ConfigMap in the endpoint's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: DataKey
    """Key whose value is taken."""

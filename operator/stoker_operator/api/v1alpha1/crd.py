"""The CustomResourceDefinition, generated from the models."""

from __future__ import annotations

from typing import Any

from stoker_operator.api.schema import structural
from stoker_operator.api.v1alpha1.endpoint import GROUP, KIND, PLURAL, VERSION, InferenceEndpoint
from stoker_operator.api.v1alpha1.status import Status


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of InferenceEndpoint."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            # Uninstalling the chart must not delete the definition, and with it all endpoints.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ie"],
                "categories": ["stoker"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _columns(),
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": _schema()},
                }
            ],
        },
    }


def _schema() -> dict[str, Any]:
    schema = structural(InferenceEndpoint)
    schema["properties"] |= {
        "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
        "kind": {"type": "string", "description": KIND},
        # The API server has its own schema of metadata; the name is listed because a rule refers to it.
        "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
        "status": structural(Status),
    }
    schema["required"] = ["spec"]
    return schema


def _columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    workload = ".status.workloads[0]"
    columns = (
        ("Model", "string", ".spec.model.source", 0),
        ("Runtime", "string", f"{workload}.runtime", 0),
        ("Accelerator", "string", ".spec.hardware.accelerator", 0),
        ("TP", "integer", f"{workload}.plan.tensor", 0),
        ("DP", "integer", f"{workload}.plan.data", 0),
        ("Desired", "integer", ".status.desiredReplicas", 0),
        ("Available", "integer", ".status.availableReplicas", 0),
        ("Ready", "string", f"{ready}.status", 0),
        ("URL", "string", ".status.url", 0),
        ("Reason", "string", f"{ready}.reason", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Updated", "integer", ".status.updatedReplicas", 1),  # only with -o wide
        ("Message", "string", f"{ready}.message", 1),
    )
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in columns
    ]

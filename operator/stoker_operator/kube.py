"""The Kubernetes API, as far as we use it; the only import of a Kubernetes client.

Objects are plain dictionaries, as the API server writes them. Calls block; callers run them in threads.
"""

from __future__ import annotations

import json
from typing import Any

import urllib3
from kubernetes import client, config

from stoker_operator.api.v1alpha1 import API_VERSION, KIND, PLURAL

Object = dict[str, Any]

_COLLECTIONS = {
    KIND: (f"apis/{API_VERSION}", PLURAL),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Service": ("api/v1", "services"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "Pod": ("api/v1", "pods"),
}

_CONNECT_SECONDS, _READ_SECONDS = 5, 30


class KubeError(Exception):
    """The API server did not do what it was asked.

    Attributes:
        status: the HTTP status; 0 where there was no answer.
        refused: the object itself is the reason, so asking again will not help.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Invalid (400, 422) or forbidden, as by a quota or an admission policy (403)."""
        return self.status in (400, 403, 422)


class Kube:
    """An API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    @classmethod
    def connect(cls) -> Kube:
        """The cluster we run in, or the one that the kubeconfig points at.

        Raises:
            KubeError: there is neither.
        """
        configuration = client.Configuration()
        try:
            config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise KubeError(0, f"no cluster: {error}") from None
        return cls(client.ApiClient(configuration))

    def serves_endpoints(self) -> bool:
        """Whether the CustomResourceDefinition is installed."""
        try:
            self._request("GET", f"/apis/{API_VERSION}")
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None."""
        try:
            return self._request("GET", _path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str, labels: dict[str, str]) -> list[Object]:
        """The objects with these labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        answer = self._request("GET", _path(kind, namespace), query={"labelSelector": selector})
        items: list[Object] = answer["items"]
        return items

    def apply(self, body: Object, manager: str, subresource: str = "") -> Object:
        """Server-side apply: the API server merges `body` and remembers which fields are ours."""
        metadata = body["metadata"]
        path = _path(body["kind"], metadata["namespace"], metadata["name"])
        return self._request(
            "PATCH",
            f"{path}/{subresource}" if subresource else path,
            query={"fieldManager": manager, "force": "true"},
            content_type="application/apply-patch+yaml",
            body=body,
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        request = self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*request, _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS))
            data = response.read()  # type: ignore[no-untyped-call]
        except client.ApiException as error:
            raise KubeError(error.status or 0, _message(error.body) or str(error.reason)) from None
        except urllib3.exceptions.HTTPError as error:
            raise KubeError(0, f"no answer from the API server: {error}") from None
        if not 200 <= response.status < 300:
            raise KubeError(response.status, _message(data) or str(response.reason))
        answer: Object = json.loads(data)
        return answer


def _path(kind: str, namespace: str, name: str = "") -> str:
    group, plural = _COLLECTIONS[kind]
    path = f"/{group}/namespaces/{namespace}/{plural}"
    return f"{path}/{name}" if name else path


def _message(body: str | bytes | None) -> str:
    """The sentence in the API server's Status object."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return ""

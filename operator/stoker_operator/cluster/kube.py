"""Client of the Kubernetes API, and the operator's only module that imports the Kubernetes client library.

Objects are plain dictionaries, as in the API's JSON. Calls block. An empty namespace means a cluster-scoped kind, or a
list over all namespaces.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import urllib3
from kubernetes import client, config

from stoker_operator.api.v1alpha1 import API_VERSION, KIND, PLURAL
from stoker_operator.workloads.kind import Resource

Object = dict[str, Any]

_COLLECTIONS = {
    KIND: (f"apis/{API_VERSION}", PLURAL),
    "ConfigMap": ("api/v1", "configmaps"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Event": ("api/v1", "events"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Namespace": ("api/v1", "namespaces"),
    "Node": ("api/v1", "nodes"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "PodMonitor": ("apis/monitoring.coreos.com/v1", "podmonitors"),
    "Role": ("apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Secret": ("api/v1", "secrets"),
    "Service": ("api/v1", "services"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "ValidatingWebhookConfiguration": ("apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"),
}
#: Media type that returns only an object's metadata.
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
#: Maximum number of objects in one page of a list.
_PAGE = 500

#: Maximum number of attempts while the API server sends Retry-After, and maximum wait between them, in seconds.
_TRIES, _LONGEST_WAIT_SECONDS = 4, 10.0

_CONNECT_SECONDS, _READ_SECONDS = 5, 30


class KubeError(Exception):
    """A request to the API server failed.

    Attributes:
        status: HTTP status, or 0 if there was no answer.
        refused: whether the API server rejected the object.
        retry_after: the API server's Retry-After in seconds, or 0 if it sent none.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def refused(self) -> bool:
        """Whether the object is invalid (400, 422), or forbidden by RBAC, a quota or an admission policy (403).

        Server-side apply reports an unknown field as an internal error (500), which is included.
        """
        return self.status in (400, 403, 422) or "failed to create typed patch object" in str(self)


def client_configuration() -> client.Configuration:
    """Return address and credentials of the kubeconfig's cluster or, without a kubeconfig, of this pod's.

    Raises:
        KubeError: there is no usable kubeconfig and no pod's service account.
    """
    configuration = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        # In a pod, HTTPS_PROXY is for requests out of the cluster. `load_kube_config` sets a kubeconfig's proxy.
        configuration.proxy = None
    # KUBECONFIG may list several files.
    files = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)
    has_file = any(file and Path(file).expanduser().exists() for file in files)
    load = config.load_kube_config if has_file else config.load_incluster_config
    try:
        load(client_configuration=configuration)
    except config.ConfigException as error:
        reason = str(error)
        if not has_file and "KUBERNETES_SERVICE_HOST" not in os.environ:
            reason = f"there is no kubeconfig ({' or '.join(filter(None, files))}); set KUBECONFIG to one"
        raise KubeError(0, f"no cluster: {reason}") from None
    return configuration


class Listing(NamedTuple):
    """Objects of a list, and the resource version at which they were read."""

    items: list[Object]
    resource_version: str


class Kube:
    """Client of an API server.

    Args:
        api: the library's client.
        resources: further kinds that are read or written.
    """

    def __init__(self, api: client.ApiClient, resources: Iterable[Resource] = ()) -> None:
        self._api = api
        self._collections = _COLLECTIONS | {each.kind: (each.path, each.plural) for each in resources}

    @classmethod
    def connect(cls, resources: Iterable[Resource] = ()) -> Kube:
        """Connect to the kubeconfig's cluster or, without a kubeconfig, to this pod's.

        Args:
            resources: as for the class.

        Raises:
            KubeError: there is no usable kubeconfig and no pod's service account.
        """
        configuration = client_configuration()
        # Retry failed connections. urllib3 must not handle Retry-After: it would sleep for the whole time, and would
        # not retry patches and creations.
        configuration.retries = urllib3.Retry(3, respect_retry_after_header=False)
        return cls(client.ApiClient(configuration), resources)

    def serves(self, kind: str) -> bool:
        """Return whether the API server has the kind."""
        group, plural = self._collections[kind]
        try:
            known = self._with_retries(f"/{group}", {})["resources"]
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return any(each["name"] == plural for each in known)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return self._request("GET", self._path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def metadata(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return only the metadata of an object, without annotations, or None if it does not exist.

        Annotations are removed because `kubectl apply` stores a copy of the object in one of them.

        Raises:
            KubeError: the request failed.
        """
        try:
            answer = self._request("GET", self._path(kind, namespace, name), accept=_METADATA)
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        found: Object = answer["metadata"]
        return {field: value for field, value in found.items() if field != "annotations"}

    def list(
        self, kind: str, namespace: str = "", labels: Mapping[str, str] | None = None, fields: str = ""
    ) -> Listing:
        """Return the objects that have these labels and match the field selector."""
        pages = list(self.pages(kind, namespace, labels, fields))
        # All pages are read at the version of the first.
        return Listing([item for page in pages for item in page.items], pages[0].resource_version)

    def pages(
        self, kind: str, namespace: str = "", labels: Mapping[str, str] | None = None, fields: str = ""
    ) -> Iterator[Listing]:
        """Yield the pages of `list` one by one, without holding all objects in memory."""
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{name}={value}" for name, value in labels.items())
        if fields:
            query["fieldSelector"] = fields
        group = self._collections[kind][0]
        version = group.removeprefix("apis/").removeprefix("api/")
        while True:
            answer = self._with_retries(self._path(kind, namespace), query)
            # Items of a list lack apiVersion and kind.
            items = [{"apiVersion": version, "kind": kind, **item} for item in answer["items"]]
            yield Listing(items, answer["metadata"]["resourceVersion"])
            if not answer["metadata"].get("continue"):
                return
            query["continue"] = answer["metadata"]["continue"]

    def _with_retries(self, path: str, query: dict[str, str]) -> Object:
        """Read a page of a list, or the kinds of an API group; retry if the API server sends Retry-After."""
        for _ in range(_TRIES - 1):
            try:
                return self._request("GET", path, query=query)
            except KubeError as error:
                if not error.retry_after:
                    raise
                time.sleep(min(error.retry_after, _LONGEST_WAIT_SECONDS))
        return self._request("GET", path, query=query)

    def apply(self, body: Object, manager: str, subresource: str = "", *, dry_run: bool = False) -> Object:
        """Apply `body` server-side as `manager`, which takes over fields that other managers own.

        Validation is strict: an unknown field is an error.
        """
        metadata = body["metadata"]
        path = self._path(body["kind"], metadata.get("namespace", ""), metadata["name"])
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        return self._request(
            "PATCH",
            f"{path}/{subresource}" if subresource else path,
            query=query | ({"dryRun": "All"} if dry_run else {}),
            content_type="application/apply-patch+yaml",
            body=body,
        )

    def create(self, body: Object) -> Object:
        """Create an object. `KubeError.status` is 409 if it already exists."""
        return self._request("POST", self._path(body["kind"], body["metadata"].get("namespace", "")), body=body)

    def replace(self, body: Object) -> Object:
        """Replace an object. `KubeError.status` is 409 if it has changed since its ``resourceVersion``."""
        metadata = body["metadata"]
        path = self._path(body["kind"], metadata.get("namespace", ""), metadata["name"])
        return self._request("PUT", path, body=body)

    def patch(self, kind: str, namespace: str, name: str, operations: Sequence[Object]) -> Object:
        """Apply a JSON patch (RFC 6902)."""
        return self._request(
            "PATCH",
            self._path(kind, namespace, name),
            content_type="application/json-patch+json",
            body=list(operations),
        )

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid, if it still exists."""
        try:
            self._request("DELETE", self._path(kind, namespace, name), body={"preconditions": {"uid": uid}})
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _path(self, kind: str, namespace: str, name: str = "") -> str:
        group, plural = self._collections[kind]
        path = f"/{group}/namespaces/{namespace}/{plural}" if namespace else f"/{group}/{plural}"
        return f"{path}/{name}" if name else path

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | Sequence[Object] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        request = self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*request, _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS))
            data = response.read()  # type: ignore[no-untyped-call]
        except client.ApiException as error:
            after = _retry_after((error.headers or {}).get("Retry-After"))
            raise KubeError(error.status or 0, _message(error.body) or str(error.reason), after) from None
        except urllib3.exceptions.HTTPError as error:
            raise KubeError(0, f"no answer from the API server: {error}") from None
        if not 200 <= response.status < 300:
            after = _retry_after(response.getheader("Retry-After"))  # type: ignore[no-untyped-call]
            raise KubeError(response.status, _message(data) or str(response.reason), after)
        answer: Object = json.loads(data)
        return answer


def _retry_after(header: str | None) -> float:
    """Return the seconds that a Retry-After header (RFC 9110) requests; 0 if it is missing or invalid."""
    try:
        return float(urllib3.Retry().parse_retry_after(header)) if header else 0
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return 0


def _message(body: str | bytes | None) -> str:
    """Return the message of the API server's Status object; empty if there is none."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return ""

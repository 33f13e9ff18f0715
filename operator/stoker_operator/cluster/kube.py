"""The Kubernetes API, as far as we use it; the only import of a Kubernetes client.

Objects are plain dictionaries, as the API server writes them. Calls block; callers run them in threads. An empty
namespace means a kind that has none, or a list over all namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
#: What an object's metadata is requested as, without anything else of it.
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
#: Objects of one answer to a list; more are requested page by page.
_PAGE = 500

#: A list is requested so often where the API server sends Retry-After, and after so long at the latest.
_TRIES, _LONGEST_WAIT_SECONDS = 4, 10.0

_CONNECT_SECONDS, _READ_SECONDS = 5, 30


class KubeError(Exception):
    """A request to the API server failed.

    Attributes:
        status: the HTTP status; 0 where there was no answer.
        refused: the object itself is the reason, so another attempt will not help.
        retry_after: seconds to wait before the next request, as the API server sent them; 0 where it did not.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def refused(self) -> bool:
        """Invalid (400, 422) or forbidden, as by a quota or an admission policy (403). Server-side apply reports a
        field that a kind does not have as an error of the server's own (500).
        """
        return self.status in (400, 403, 422) or "failed to create typed patch object" in str(self)


class Listing(NamedTuple):
    """Some objects, and the version of the cluster they were read at."""

    items: list[Object]
    resource_version: str


class Kube:
    """An API server.

    Args:
        api: how it is reached.
        resources: further kinds that are read or written.
    """

    def __init__(self, api: client.ApiClient, resources: Iterable[Resource] = ()) -> None:
        self._api = api
        self._collections = _COLLECTIONS | {each.kind: (each.path, each.plural) for each in resources}

    @classmethod
    def connect(cls, resources: Iterable[Resource] = ()) -> Kube:
        """The cluster we run in, or the one that the kubeconfig points at; `resources` are as of the class.

        Raises:
            KubeError: there is neither.
        """
        configuration = client.Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            # In a pod, HTTPS_PROXY is the way out of the cluster. One that a kubeconfig names is set further on.
            configuration.proxy = None
        try:
            with contextlib.redirect_stdout(None):  # it prints where there is no kubeconfig
                config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise KubeError(0, f"no cluster: {error}") from None
        # Connections that broke are made again. How long to wait for an API server that is too busy is for callers to
        # decide: urllib3 would sleep for all of Retry-After, and only before what is not a patch or a creation.
        configuration.retries = urllib3.Retry(3, respect_retry_after_header=False)
        return cls(client.ApiClient(configuration), resources)

    def serves(self, kind: str) -> bool:
        """Whether the API server has the kind; its CustomResourceDefinition may be missing."""
        group, plural = self._collections[kind]
        try:
            known = self._with_retries(f"/{group}", {})["resources"]
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return any(each["name"] == plural for each in known)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None."""
        try:
            return self._request("GET", self._path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def metadata(self, kind: str, namespace: str, name: str) -> Object | None:
        """The metadata of an object of which nothing else is to be sent, or None. Annotations are left out: kubectl
        repeats an object's content in one.

        Raises:
            KubeError: the API server could not be reached, or could not answer.
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
        """The objects with these labels, of which the field selector holds."""
        pages = list(self.pages(kind, namespace, labels, fields))
        # As the first page is, so are all.
        return Listing([item for page in pages for item in page.items], pages[0].resource_version)

    def pages(
        self, kind: str, namespace: str = "", labels: Mapping[str, str] | None = None, fields: str = ""
    ) -> Iterator[Listing]:
        """As `list`, page by page, for who need not have all of them in memory."""
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{name}={value}" for name, value in labels.items())
        if fields:
            query["fieldSelector"] = fields
        group = self._collections[kind][0]
        version = group.removeprefix("apis/").removeprefix("api/")
        while True:
            answer = self._with_retries(self._path(kind, namespace), query)
            # Items of a list do not say what they are.
            items = [{"apiVersion": version, "kind": kind, **item} for item in answer["items"]]
            yield Listing(items, answer["metadata"]["resourceVersion"])
            if not answer["metadata"].get("continue"):
                return
            query["continue"] = answer["metadata"]["continue"]

    def _with_retries(self, path: str, query: dict[str, str]) -> Object:
        """What is read there, as a page of a list: worth some patience, since who needs it can do nothing without."""
        for _ in range(_TRIES - 1):
            try:
                return self._request("GET", path, query=query)
            except KubeError as error:
                if not error.retry_after:
                    raise
                time.sleep(min(error.retry_after, _LONGEST_WAIT_SECONDS))
        return self._request("GET", path, query=query)

    def apply(self, body: Object, manager: str, subresource: str = "", *, dry_run: bool = False) -> Object:
        """Server-side apply: the API server merges `body` and records which fields are ours. It is strict: an unknown
        field is an error."""
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
        """Creates an object; 409 where there is one."""
        return self._request("POST", self._path(body["kind"], body["metadata"].get("namespace", "")), body=body)

    def replace(self, body: Object) -> Object:
        """Replaces an object; 409 where it has changed since its ``resourceVersion``."""
        metadata = body["metadata"]
        path = self._path(body["kind"], metadata.get("namespace", ""), metadata["name"])
        return self._request("PUT", path, body=body)

    def patch(self, kind: str, namespace: str, name: str, operations: Sequence[Object]) -> Object:
        """JSON patch (RFC 6902)."""
        return self._request(
            "PATCH",
            self._path(kind, namespace, name),
            content_type="application/json-patch+json",
            body=list(operations),
        )

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes the object of that uid, if it is still there."""
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
    """The seconds of a Retry-After header (RFC 9110), which may name a time instead."""
    try:
        return float(urllib3.Retry().parse_retry_after(header)) if header else 0
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return 0


def _message(body: str | bytes | None) -> str:
    """The sentence in the API server's Status object."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return ""

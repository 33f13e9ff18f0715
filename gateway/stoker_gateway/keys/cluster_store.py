"""Store of keys as Secrets in a namespace of the kubeconfig's cluster, or else of the cluster in which the process
runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import cast

import urllib3
from kubernetes import client, config

from stoker_gateway.keys import manifests
from stoker_gateway.keys.errors import KeyStoreError, absent, taken
from stoker_gateway.keys.manifests import Manifest

_TIMEOUT_S = (5, 30)


class ClusterStore:
    """Store of the keys in a namespace.

    Args:
        namespace: namespace of the gateway.

    Raises:
        KeyStoreError: no cluster is configured.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        configuration = client.Configuration()
        try:
            with contextlib.redirect_stdout(None):  # `load_config` prints if there is no kubeconfig
                config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise KeyStoreError(f"no cluster: {error}; set KUBECONFIG, or use --file") from None
        configuration.retries = urllib3.Retry(2, respect_retry_after_header=False)
        self._secrets = client.CoreV1Api(client.ApiClient(configuration))

    def read(self) -> list[Manifest]:
        """See `KeyStore`."""
        with self._translated_errors():
            found = self._secrets.list_namespaced_secret(
                self._namespace, label_selector=f"{manifests.LABEL}=true", _request_timeout=_TIMEOUT_S
            )
        return [self._secrets.api_client.sanitize_for_serialization(each) for each in found.items]

    def create(self, manifest: Manifest) -> None:
        """See `KeyStore`."""
        name, body = manifest["metadata"]["name"], cast(client.V1Secret, manifest)  # the client accepts dictionaries
        with self._translated_errors():
            try:
                self._secrets.create_namespaced_secret(self._namespace, body, _request_timeout=_TIMEOUT_S)
            except client.ApiException as error:
                if error.status == 409 and _status(error).get("reason") == "AlreadyExists":
                    raise taken(name.removeprefix(manifests.name_of(""))) from None
                raise

    def delete(self, key_id: str) -> None:
        """See `KeyStore`. A Secret of this name with another type is not deleted."""
        name = manifests.name_of(key_id)
        with self._translated_errors():
            try:
                found = self._secrets.read_namespaced_secret(name, self._namespace, _request_timeout=_TIMEOUT_S)
                if found.type != manifests.TYPE or found.metadata is None:
                    raise absent(key_id)
                only_this = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=found.metadata.uid))
                self._secrets.delete_namespaced_secret(
                    name, self._namespace, body=only_this, _request_timeout=_TIMEOUT_S
                )
            except client.ApiException as error:
                if error.status == 404:
                    raise absent(key_id) from None
                raise

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except client.ApiException as error:
            raise KeyStoreError(f"the API server rejected the request: {_message(error)}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise KeyStoreError(f"no answer from the API server: {error}") from None


def _status(error: client.ApiException) -> dict[str, object]:
    with contextlib.suppress(ValueError, TypeError):
        status = json.loads(error.body or "")
        if isinstance(status, dict):
            return status
    return {}


def _message(error: client.ApiException) -> object:
    return _status(error).get("message") or f"{error.status} {error.reason}"

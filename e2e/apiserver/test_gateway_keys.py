"""Gateway keys as Secrets in a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from apiserver import ApiServer
from kubernetes import client, config

from stoker_gateway.keys import manifests
from stoker_gateway.keys.file_store import FileStore
from stoker_gateway.keys.key import Key, Limits
from stoker_gateway.keys.keyring import Keyring

Command = Callable[..., tuple[int, str, str]]
_MAIN = "import sys; from stoker_gateway.cli.keys import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def core(apiserver: ApiServer) -> client.CoreV1Api:
    return client.CoreV1Api(config.new_client_from_config(str(apiserver.kubeconfig)))


@pytest.fixture
def namespace(core: client.CoreV1Api) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


@pytest.fixture
def keys(apiserver: ApiServer) -> Command:
    """The command as a user runs it: exit code and output."""

    def run(*words: str, kubeconfig: Path = apiserver.kubeconfig) -> tuple[int, str, str]:
        command = [sys.executable, "-c", _MAIN, *words]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in ended.stderr
        return ended.returncode, ended.stdout, ended.stderr

    return run


def keyring(core: client.CoreV1Api, namespace: str) -> Keyring:
    """Return the keyring as a gateway reads it, from the API server's JSON."""
    path = f"/api/v1/namespaces/{namespace}/secrets"
    request = core.api_client.param_serialize("GET", path, header_params={"Accept": "application/json"})
    found, faults = manifests.read_all(json.loads(core.api_client.call_api(*request).read())["items"])
    assert not faults
    return found


def test_key_is_created_listed_and_revoked(
    core: client.CoreV1Api, namespace: str, keys: Command, tmp_path: Path
) -> None:
    namespace_flag = ("--namespace", namespace)
    words = ["--model", "org/*", "--model", "ü b", "--tokens-per-minute", "5", "--priority", "-3", "--expires-in", "1h"]
    code, text, stderr = keys("create", *namespace_flag, "--id", "team-a", *words)
    assert code == 0 and "team-a" in stderr and text.strip() not in stderr
    key = keyring(core, namespace).find(text.strip(), time.time())
    assert (key.id, key.models, key.limits, key.priority) == ("team-a", ("org/*", "ü b"), Limits(None, 5, None), -3)
    assert keys("create", *namespace_flag)[0] == 0
    code, out, _ = keys("list", *namespace_flag, "--output", "json")
    shown = {each["id"]: each for each in json.loads(out)}
    assert code == 0 and len(shown) == 2 and shown["team-a"]["models"] == ["org/*", "ü b"]
    assert all(each["created"] for each in shown.values()) and key.digest not in out

    code, out, stderr = keys("create", *namespace_flag, "--id", "team-a")
    assert (code, out) == (2, "") and "--id" in stderr
    assert keyring(core, namespace).keys["team-a"] == key

    assert keys("revoke", *namespace_flag, "team-a")[0] == 0
    assert "team-a" not in keyring(core, namespace).keys
    code, _, stderr = keys("revoke", *namespace_flag, "team-a")
    assert code == 2 and "team-a" in stderr


def test_keys_of_a_file_can_be_applied(core: client.CoreV1Api, namespace: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "keys.yaml")
    made = Key("a", "0" * 64, ("m", "n/*"), Limits(1, 2, 3), 4, 2e9)
    store.create(manifests.write(made))
    for each in yaml.safe_load_all((tmp_path / "keys.yaml").read_text()):
        core.create_namespaced_secret(namespace, each)
    assert keyring(core, namespace).keys == {"a": made}


def test_secret_without_a_key_is_unchanged(core: client.CoreV1Api, namespace: str, keys: Command) -> None:
    core.create_namespaced_secret(namespace, {"metadata": {"name": "stoker-key-mine"}, "stringData": {"a": "b"}})
    code, _, stderr = keys("revoke", "--namespace", namespace, "mine")
    assert code == 2 and "mine" in stderr
    assert core.read_namespaced_secret("stoker-key-mine", namespace).data
    code, out, stderr = keys("create", "--namespace", namespace, "--id", "mine")
    assert (code, out) == (2, "")


def test_refusals_of_the_api_server_are_reported(
    apiserver: ApiServer, core: client.CoreV1Api, namespace: str, keys: Command, tmp_path: Path
) -> None:
    code, out, stderr = keys("create", "--namespace", "none-such")
    assert (code, out) == (1, "") and '"none-such" not found' in stderr

    core.create_namespaced_service_account(namespace, {"metadata": {"name": "nobody"}})
    token = core.create_namespaced_service_account_token("nobody", namespace, {"spec": {"expirationSeconds": 600}})
    document = yaml.safe_load(apiserver.kubeconfig.read_text())
    document["users"] = [{"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]]
    path = tmp_path / "nobody.conf"
    path.write_text(yaml.safe_dump(document))
    for words in (["create"], ["list"], ["revoke", "a"]):
        code, out, stderr = keys(words[0], "--namespace", namespace, *words[1:], kubeconfig=path)
        assert (code, out) == (1, "") and "forbidden" in stderr

    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    path.write_text(yaml.safe_dump(document))
    code, out, stderr = keys("list", "--namespace", namespace, kubeconfig=path)
    assert (code, out) == (1, "") and "no answer from the API server" in stderr

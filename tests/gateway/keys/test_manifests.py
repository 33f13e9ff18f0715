"""Keys as Secret manifests: written ones can be read back, invalid ones yield no key."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_gateway.keys import manifests, values
from stoker_gateway.keys.errors import KeyManifestError
from stoker_gateway.keys.key import KEY_ID, Key, Limits, digest_of

LIMIT = st.none() | st.integers(1, values.MAX_LIMIT)
NAMES = st.text(min_size=1).filter(lambda text: text.isprintable() and text == text.strip())
KEYS = st.builds(
    Key,
    st.from_regex(KEY_ID, fullmatch=True),
    st.text().map(digest_of),
    st.lists(NAMES, unique=True, max_size=3).map(tuple),
    st.builds(Limits, LIMIT, LIMIT, LIMIT),
    st.integers(-1000, 1000),
    st.none() | st.integers(-(10**10), 2 * 10**11).map(float),
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def stored(manifest: Any) -> Any:
    """Return the manifest as an API server stores it."""
    made = copy.deepcopy(manifest)
    made["data"] = {name: base64.b64encode(text.encode()).decode() for name, text in made.pop("stringData").items()}
    return json.loads(json.dumps(made))


@settings(max_examples=100)
@given(KEYS)
def test_written_key_is_read_back(key: Key) -> None:
    manifest = manifests.write(key)
    assert manifests.read(yaml.safe_load(yaml.safe_dump(manifest))) == key
    assert manifests.read(stored(manifest)) == key
    item = {name: value for name, value in stored(manifest).items() if name not in ("apiVersion", "kind")}
    assert manifests.read(item) == key  # an item of a list


FULL = manifests.write(Key("k", digest_of("x"), ("m",), Limits(1, 2, 3), 4, 5e9))


def with_field(field: str, value: Any) -> Any:
    return FULL | {"stringData": FULL["stringData"] | {field: value}}


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        *((with_field("sha256", text), "sha256: ") for text in ("", "ab", "A" * 64, digest_of("x") + "\n", "é" * 64)),
        *((with_field("models", text), "models: ") for text in ("", "\n", " m", "m\n n", "a\tb", "m\r\n")),
        *(
            (with_field(field, text), f"{field}: ")
            for field in ("requestsPerMinute", "tokensPerMinute", "concurrency")
            for text in ("", "0", "-1", "1.5", "1e3", "٣", "inf", "1_000", " 1", "9" * 5000, str(values.MAX_LIMIT + 1))
        ),
        *((with_field("priority", text), "priority: ") for text in ("", "1001", "-1001", "high", "--1")),
        *(
            (with_field("expires", text), "expires: ")
            for text in (
                "",
                "never",
                "2030-01-31",
                "2030-01-31T12:00:00",
                "2030-02-30T12:00:00Z",
                "2030-01-31T12:00:60Z",
                "2030-01-31T12:00:00+25:00",
                "9999-12-31T23:59:59-23:59",
                "0001-01-01T00:00:00+23:59",
                "٢030-01-31T12:00:00Z",
                "1893456000",
            )
        ),
        (with_field("tokensPerMinutes", "1"), "tokensPerMinutes: "),
        (with_field("key", "sk-stoker-k-1"), "key: "),
        (with_field("priority", 4), "stringData.priority: "),
        (with_field("a\nb", 4), "a\\nb"),
        (FULL | {"data": {"priority": "4"}}, "data.priority: "),
        (FULL | {"data": {"priority": "/w=="}}, "data.priority: "),
        (FULL | {"data": []}, "data: "),
        (FULL | {"type": "Opaque"}, "type: "),
        (FULL | {"kind": "ConfigMap"}, "kind: "),
        (FULL | {"metadata": FULL["metadata"] | {"labels": {}}}, "metadata.labels: "),
        (FULL | {"metadata": FULL["metadata"] | {"labels": {manifests.LABEL: True}}}, "metadata.labels: "),
        (FULL | {"metadata": FULL["metadata"] | {"name": "k"}}, "metadata.name: "),
        (FULL | {"metadata": FULL["metadata"] | {"name": "stoker-key-K"}}, "metadata.name: "),
        (FULL | {"metadata": FULL["metadata"] | {"name": "stoker-key-" + "a" * 41}}, "metadata.name: "),
        (FULL | {"metadata": FULL["metadata"] | {"name": "stoker-key-"}}, "metadata.name: "),
    ],
)
def test_invalid_manifest_names_its_fault_and_affects_no_other_key(manifest: Any, named: str) -> None:
    with pytest.raises(KeyManifestError) as error:
        manifests.read(manifest)
    message = str(error.value)
    assert message.startswith(f"Secret {manifest['metadata']['name']}: ") and named in message
    assert message.isprintable() and len(message) < 400
    other_key = manifests.write(Key("other", digest_of("y")))
    keyring, faults = manifests.read_all([manifest, other_key])
    assert list(keyring.keys) == ["other"] and faults == [message]


@settings(max_examples=100)
@given(st.lists(ANY | ANY.map(lambda any: FULL | {"metadata": any}) | ANY.map(lambda any: FULL | {"stringData": any})))
def test_other_documents_yield_faults_and_no_keys(read: list[Any]) -> None:
    keyring, faults = manifests.read_all(read)
    assert not keyring.keys and len(faults) == len(read)


def test_faults_never_contain_a_keys_digest() -> None:
    _, [fault] = manifests.read_all([with_field("sha256", "sk-stoker-k-private")])
    assert "private" not in fault


def test_first_of_two_equal_keys_is_valid_and_deleted_keys_are_not() -> None:
    same_name = manifests.write(Key("k", digest_of("y")))
    same_text = manifests.write(Key("other", digest_of("x")))
    keyring, faults = manifests.read_all([FULL, same_name, same_text])
    assert list(keyring.keys.values()) == [manifests.read(FULL)]
    assert [fault.split(": ")[0] for fault in faults] == ["Secret stoker-key-k", "Secret stoker-key-other"]
    deleted = FULL | {"metadata": FULL["metadata"] | {"deletionTimestamp": "2030-01-31T12:00:00Z"}}
    keyring, faults = manifests.read_all([deleted, same_text])
    assert list(keyring.keys) == ["other"] and not faults

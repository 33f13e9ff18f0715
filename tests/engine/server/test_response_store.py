"""The store of responses: bounded, and shared fairly between owners."""

from __future__ import annotations

import random

from stoker_common.errors import NotFoundError
from stoker_engine.server.responses.store import ResponseStore, StoredResponse


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"x" * size, b"", 0)


def holds(store: ResponseStore, owner: bytes, name: str) -> bool:
    try:
        store.get(owner, name)
    except NotFoundError:
        return False
    return True


def test_the_store_is_bounded() -> None:
    rng = random.Random(1)
    store = ResponseStore(max_bytes=1000, max_responses=20)
    sizes: dict[tuple[bytes, str], int] = {}
    for number in range(2000):
        owner, name, size = bytes([rng.randrange(4)]), str(rng.randrange(60)), rng.randrange(1, 300)
        sizes[owner, name] = size
        assert store.put(owner, name, stored(size)) == holds(store, owner, name)
        if number % 50 == 0:
            kept = [key for key in sizes if holds(store, *key)]
            assert len(kept) <= 20
            assert sum(sizes[key] for key in kept) <= 1000
            assert kept, "some responses are kept"


def test_the_most_recently_used_responses_are_kept() -> None:
    store = ResponseStore(max_bytes=300)
    for name in "abc":
        store.put(b"o", name, stored(100))
    store.get(b"o", "a")
    store.put(b"o", "d", stored(100))
    assert [name for name in "abcd" if holds(store, b"o", name)] == ["a", "c", "d"]
    assert not store.put(b"o", "e", stored(301))
    assert [name for name in "abcde" if holds(store, b"o", name)] == ["a", "c", "d"], (
        "a response that is too large displaces no other"
    )


def test_an_owner_cannot_displace_all_responses_of_another() -> None:
    store = ResponseStore(max_bytes=1000, max_responses=30)
    for name in "ab":
        store.put(b"small", name, stored(100))
    for number in range(100):
        store.put(b"large", str(number), stored(50))
    assert all(holds(store, b"small", name) for name in "ab")
    assert holds(store, b"large", "99")
    for number in range(100):
        store.put(b"many", str(number), stored(1))
    assert all(holds(store, b"small", name) for name in "ab"), "owners with few responses lose none"
    store.delete(b"small", "a")
    assert not holds(store, b"small", "a")

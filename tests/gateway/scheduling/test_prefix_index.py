"""The prefix index, compared with a plain list of which server got what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.scheduling.prefix_index import FOLLOWED, PrefixIndex

SERVERS = [f"s{number}" for number in range(6)]
#: Conversations as paths in a tree; the paths' names are the hashes of their blocks.
PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map(
    lambda steps: [("".join(steps[: at + 1])).encode() for at in range(len(steps))]
)


@given(st.lists(st.tuples(PATHS, st.sampled_from(SERVERS)), max_size=30), PATHS)
def test_index_finds_the_holders_of_each_block(prompts: list[tuple[list[bytes], str]], query: list[bytes]) -> None:
    index = PrefixIndex(1000)
    for server in SERVERS:
        index.add_server(server)
    for path, server in prompts:
        index.remember(path, server)
    masks = index.find(query)
    for number, block in enumerate(query):
        holders = {server for path, server in prompts if block in path}
        if not holders:
            assert len(masks) == number
            break
        assert set(index.names(masks[number] & ~FOLLOWED, 99)) == holders
        assert bool(masks[number] & FOLLOWED) == any(block in path[:-1] for path, _ in prompts)
    else:
        assert len(masks) == len(query)


@given(st.lists(st.tuples(PATHS, st.sampled_from(SERVERS)), max_size=40), st.integers(1, 12))
def test_memory_is_bounded_and_beginnings_are_forgotten_last(
    prompts: list[tuple[list[bytes], str]], max_blocks: int
) -> None:
    index = PrefixIndex(max_blocks)
    for server in SERVERS:
        index.add_server(server)
    for path, server in prompts:
        index.remember(path, server)
        assert len(index) <= max_blocks
        found = len(index.find(path))
        assert found == min(max_blocks, len(path))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SERVERS)), max_size=200))
def test_present_servers_never_share_a_bit(changes: list[tuple[bool, str]]) -> None:
    index, there = PrefixIndex(10), set[str]()
    for comes, server in changes:
        if comes:
            index.add_server(server)
            there.add(server)
        else:
            index.remove_server(server)
            there.discard(server)
        bits = [index.bit(each) for each in there]
        assert len(set(bits)) == len(bits)
        assert all(bit.bit_count() == 1 and bit != FOLLOWED for bit in bits)
        assert set(index.names(index.mask(there), 99)) == there


def test_bits_of_removed_servers_are_reused() -> None:
    index = PrefixIndex(10)
    for number in range(5000):
        index.add_server(f"pod{number}")
        index.remove_server(f"pod{number - 3}")
    assert index.mask([f"pod{number}" for number in range(4997, 5000)]).bit_length() < 100


def test_server_that_returns_holds_no_blocks() -> None:
    index = PrefixIndex(10)
    index.add_server("a")
    index.remember([b"1"], "a")
    index.add_server("a")
    assert not index.find([b"1"])[0] & index.bit("a")


def test_selection_of_many_holders_rotates_with_the_start() -> None:
    index, servers = PrefixIndex(10), [f"s{number}" for number in range(100)]
    for server in servers:
        index.add_server(server)
    mask = index.mask(servers)
    met = {name for start in range(0, 200, 7) for name in index.names(mask, 8, start)}
    assert all(len(index.names(mask, 8, start)) == 8 for start in range(92))
    assert len(met) > 80

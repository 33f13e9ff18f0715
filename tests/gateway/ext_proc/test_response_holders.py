"""Which server stores which response."""

from __future__ import annotations

from stoker_gateway.ext_proc.response_holders import Holder, ResponseHolders


def test_responses_are_found_by_the_names_that_servers_give_them() -> None:
    holders, one, two = ResponseHolders(), Holder("m", "10.0.0.1:80"), Holder("m", "10.0.0.2:80")
    made = holders.sent("me", one, 1, "id_0123abcd", None)
    assert holders.sent("me", two, 2, "id", "mine") == "mine"
    second = holders.sent("me", two, 3, None, None)
    assert len(holders) == 4 and made != second
    assert (holders.of("me", made), holders.of("me", second)) == (one, two)
    assert holders.of("me", "resp_id_0123abcd_ffff0000") == one
    assert holders.of("me", "mine") == two
    for unknown in ("", "resp_", "resp_id", "resp_id_ffff0000", "mine_0123", "_" * 9):
        assert holders.of("me", unknown) is None
    holders.sent("me", two, 4, "id_0123abcd", None)  # the same request again, on another server
    assert holders.of("me", "resp_id_0123abcd_ffff0000") == two


def test_oldest_response_names_are_forgotten() -> None:
    holders = ResponseHolders(max_names=3)
    for number in range(10):
        holders.sent("me", Holder("m", f"10.0.0.{number}:80"), number, None, f"r{number}")
    assert len(holders) == 3
    assert [number for number in range(10) if holders.of("me", f"r{number}")] == [7, 8, 9]


def test_clients_cannot_redirect_lookups_of_other_clients() -> None:
    holders, one, two = ResponseHolders(), Holder("m", "10.0.0.1:80"), Holder("m", "10.0.0.2:80")
    holders.sent("me", one, 1, "id", None)
    holders.sent("another", two, 2, "id", None)
    holders.sent("another", two, 3, None, "resp_id_ffff0000")
    assert holders.of("me", "resp_id_ffff0000") == one
    assert holders.of("another", "resp_id_ffff0000") == two
    assert holders.of("a third", "resp_id_ffff0000") is None


def test_a_response_is_held_by_the_server_that_answered() -> None:
    holders, one, two = ResponseHolders(), Holder("m", "10.0.0.1:80"), Holder("m", "10.0.0.2:80")
    names = [holders.sent("me", one, number, "the same id", None) for number in range(3)]
    holders.answered("m", 1, two.server)
    holders.answered("another", 2, two.server)
    holders.answered("m", 2, one.server)
    assert [holders.of("me", name) for name in names] == [one, two, one]
    holders.answered("m", 1, one.server)  # it has ended already
    assert holders.of("me", names[1]) == two

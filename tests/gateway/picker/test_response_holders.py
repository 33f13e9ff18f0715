"""Who holds which response."""

from __future__ import annotations

from stoker_gateway.picker.response_holders import Holder, ResponseHolders


def test_responses_are_found_by_the_names_that_servers_give_them() -> None:
    holders, one, two = ResponseHolders(), Holder("m", "10.0.0.1:80"), Holder("m", "10.0.0.2:80")
    holders.sent("me", one, "id_0123abcd", None)
    holders.sent("me", two, "id", "mine")
    holders.sent("me", two, None, None)
    assert len(holders) == 2
    assert holders.of("me", "resp_id_0123abcd_ffff0000") == one
    assert holders.of("me", "mine") == two
    for unknown in ("", "resp_", "resp_id", "resp_id_ffff0000", "mine_0123", "_" * 9):
        assert holders.of("me", unknown) is None
    holders.sent("me", two, "id_0123abcd", None)  # the same request again, elsewhere
    assert holders.of("me", "resp_id_0123abcd_ffff0000") == two


def test_the_oldest_are_forgotten() -> None:
    holders = ResponseHolders(most=3)
    for number in range(10):
        holders.sent("me", Holder("m", f"10.0.0.{number}:80"), f"r{number}", None)
    assert len(holders) == 3
    assert [number for number in range(10) if holders.of("me", f"resp_r{number}_0123abcd")] == [7, 8, 9]


def test_nobody_leads_the_lookups_of_another_elsewhere() -> None:
    holders, one, two = ResponseHolders(), Holder("m", "10.0.0.1:80"), Holder("m", "10.0.0.2:80")
    holders.sent("me", one, "id", None)
    holders.sent("another", two, "id", None)
    holders.sent("another", two, None, "resp_id_ffff0000")
    assert holders.of("me", "resp_id_ffff0000") == one
    assert holders.of("another", "resp_id_ffff0000") == two
    assert holders.of("a third", "resp_id_ffff0000") is None

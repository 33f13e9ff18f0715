"""Stop strings end the text wherever it is cut into deltas, and never leak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.tokens.stop import StopStrings

_letters = st.text("ab", max_size=12)


def feed(watcher: StopStrings, pieces: list[str]) -> tuple[list[str], str | None]:
    told = []
    for piece in pieces:
        text, found = watcher.add(piece)
        told.append(text)
        if found is not None:
            return told, found
    return [*told, watcher.flush()], None


@given(
    pieces=st.lists(_letters, max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_the_cuts(pieces: list[str], stop: list[str], include: bool) -> None:
    text = "".join(pieces)
    told, found = feed(StopStrings(tuple(stop), include), pieces)
    by_letter, same = feed(StopStrings(tuple(stop), include), list(text))
    assert ("".join(told), found) == ("".join(by_letter), same)
    if found is None:
        assert "".join(told) == text
        assert not any(string in text for string in stop)
    else:
        before = "".join(told).removesuffix(found) if include else "".join(told)
        assert text.startswith(before + found)
        assert not any(string in (before + found)[:-1] for string in stop), "it was not the first to be complete"
        assert include or not any(string in before for string in stop)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    watcher = StopStrings(("END",))
    assert watcher.add("the E") == ("the ", None)
    assert watcher.add("N") == ("", None)
    assert watcher.add("T") == ("ENT", None)
    assert watcher.add("END of") == ("", "END")


def test_before_it_is_watched_a_stop_string_may_begin_but_not_end() -> None:
    watcher = StopStrings(("ab",))
    assert watcher.add("ab a", watch=False) == ("ab ", None)
    assert watcher.add("b") == ("", "ab")

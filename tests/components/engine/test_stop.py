"""Stop strings in text that grows by tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workerkit.components.engine.stop import Released, StopStrings
from workerkit.framework.errors import RequestError


def test_b142_the_tokens_that_complete_the_stop_count_and_no_more():
    assert StopStrings([" ha ha"]).push(["a", " ha", " ha", " x", " y"]) == Released("a", 3, True)


def test_b144_the_stop_is_found_wherever_it_is_in_a_step():
    assert StopStrings(["S"]).push(["S", "b", "c", "d", "e"]) == Released("", 1, True)
    assert StopStrings(["S"]).push(["a", "b", "c", "d", "S"]) == Released("abcd", 5, True)


def test_b21_text_is_held_back_in_characters():
    stop = StopStrings(["ZZZ"])
    assert "".join(stop.push([piece]).text for piece in "请请请") + stop.flush() == "请请请"
    stop = StopStrings(["请请!"])
    assert [stop.push([piece]).text for piece in "a请请"] == ["a", "", ""]
    assert stop.flush() == "请请"


def test_only_what_may_begin_a_stop_is_held_back():
    stop = StopStrings(["END", "\n\n"])
    assert [stop.push([piece]).text for piece in ("so", " E", "N", "T", "\n", "x")] == ["so", " ", "", "ENT", "", "\nx"]
    assert stop.flush() == ""


def test_a_stop_inside_one_token_and_over_steps():
    assert StopStrings(["b"]).push(["abc"]) == Released("a", 1, True)
    stop = StopStrings(["abc"])
    assert stop.push(["xa"]) == Released("x", 1, False)
    assert stop.push(["", "b", "cd"]) == Released("", 3, True)
    assert stop.flush() == ""


def test_the_leftmost_of_several_wins():
    assert StopStrings(["cd", "bcde"]).push(["abcde"]) == Released("a", 1, True)


def test_without_stops_nothing_is_held_back():
    assert StopStrings(()).push(["a", "b"]) == Released("ab", 2, False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="at least one character"):
        StopStrings(["x", ""])


letters = st.text(alphabet="ab请", max_size=4)


@given(st.lists(letters, max_size=12), st.lists(letters.filter(bool), max_size=3), st.data())
def test_any_partition_into_steps_gives_the_same(pieces, stops, data):
    """Against the definition: the first piece that completes a stop ends the text before the leftmost stop."""
    text, count = "".join(pieces), len(pieces)
    for number in range(1, len(pieces) + 1):
        so_far = "".join(pieces[:number])
        starts = [so_far.find(stop) for stop in stops if stop in so_far]
        if starts:
            text, count = so_far[: min(starts)], number
            break
    watcher, shown, counted, rest, stopped = StopStrings(stops), "", 0, list(pieces), False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        released = watcher.push(rest[:size])
        shown, counted, stopped = shown + released.text, counted + released.num_pieces, released.stopped
        rest = rest[size:]
    assert (shown + watcher.flush(), counted) == (text, count)

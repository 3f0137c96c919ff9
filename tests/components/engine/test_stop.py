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
    assert "".join(stop.push([piece]).text for piece in "请请请") + stop.finish("").text == "请请请"
    stop = StopStrings(["请请!"])
    assert [stop.push([piece]).text for piece in "a请请"] == ["a", "", ""]
    assert stop.finish("").text == "请请"


def test_only_what_may_begin_a_stop_is_held_back():
    stop = StopStrings(["END", "\n\n"])
    assert [stop.push([piece]).text for piece in ("so", " E", "N", "T", "\n", "x")] == ["so", " ", "", "ENT", "", "\nx"]
    assert stop.finish("").text == ""


def test_a_stop_inside_one_token_and_over_steps():
    assert StopStrings(["b"]).push(["abc"]) == Released("a", 1, True)
    stop = StopStrings(["abc"])
    assert stop.push(["xa"]) == Released("x", 1, False)
    assert stop.push(["", "b", "cd"]) == Released("", 3, True)
    assert stop.finish("").text == ""


def test_the_leftmost_of_several_wins():
    assert StopStrings(["cd", "bcde"]).push(["abcde"]) == Released("a", 1, True)


def test_include_shows_the_stop_and_nothing_behind_it():
    assert StopStrings(["b"], include=True).push(["abc"]) == Released("ab", 1, True)
    assert StopStrings(["cd", "bcde"], include=True).push(["abcdef"]) == Released("abcde", 1, True)


def test_b06_text_of_the_first_min_tokens_is_not_looked_at():
    """B06: what they complete does not count, what begins in them and is completed later does."""
    assert StopStrings(["\n"], min_tokens=2).push(["a\n", "\n", "b", "\n"]) == Released("a\n\nb", 4, True)
    assert StopStrings(["\n"], min_tokens=4).push(["\n"] * 4) == Released("\n\n\n\n", 4, False)
    stop = StopStrings(["ab"], min_tokens=2)
    assert stop.push(["x", "a"]) == Released("x", 2, False)
    assert stop.push(["b"]) == Released("", 1, True)


def test_a_stop_inside_what_is_held_back_for_another_was_before_min_tokens():
    stop = StopStrings(["a", "xay"], min_tokens=2)
    assert stop.push(["x", "a", "z"]) == Released("xaz", 3, False)
    assert StopStrings(["a", "xay"], min_tokens=2).push(["x", "a", "y"]) == Released("", 3, True)


def test_the_rest_of_a_text_belongs_to_its_last_token():
    stop = StopStrings(["z"])
    stop.push(["a"])
    assert stop.finish("yz!") == Released("y", 0, True)
    stop = StopStrings(["z"], min_tokens=1)
    stop.push(["a"])
    assert stop.finish("yz!") == Released("yz!", 0, False)


def test_without_stops_nothing_is_held_back():
    assert StopStrings(()).push(["a", "b"]) == Released("ab", 2, False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="at least one character"):
        StopStrings(["x", ""])


letters = st.text(alphabet="ab请", max_size=4)


@given(st.lists(letters, max_size=12), st.lists(letters.filter(bool), max_size=3), st.integers(0, 4), st.data())
def test_any_partition_into_steps_gives_the_same(pieces, stops, min_tokens, data):
    """Against the definition: the first piece after min_tokens that completes a stop ends the text before the leftmost
    one that it completes."""
    text, count = "".join(pieces), len(pieces)
    for number in range(min_tokens + 1, len(pieces) + 1):
        before, so_far = len("".join(pieces[: number - 1])), "".join(pieces[:number])
        starts = [
            start
            for stop in stops
            for start in range(len(so_far))
            if so_far.startswith(stop, start) and start + len(stop) > before
        ]
        if starts:
            text, count = so_far[: min(starts)], number
            break
    watcher = StopStrings(stops, min_tokens=min_tokens)
    shown, counted, rest, stopped = "", 0, list(pieces), False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        released = watcher.push(rest[:size])
        shown, counted, stopped = shown + released.text, counted + released.num_pieces, released.stopped
        rest = rest[size:]
    assert (shown + watcher.finish("").text, counted) == (text, count)

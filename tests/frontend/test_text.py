import codecs
import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.detokenizer import Detokenizer, Leading
from dcpjax.frontend.text import TextStream, first_stop, held_back

LETTERS = st.text("ab", max_size=4)  # few letters, so that stops begin, break off and overlap often
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True)
WIDE = "ab日🙂"  # one, three and four bytes
EXAMPLES = 5000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 100


class Pieces:
    """A tokenizer whose token i is the i-th piece; `rest` comes only at the end, like half a character."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def append(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def stream(pieces: Sequence[str], rest: str = "", **options) -> tuple[list[str], TextStream]:
    """What is given out after each token and at the end."""
    made = TextStream(Pieces(pieces, rest), SamplingParams(max_tokens=None, **options))
    given_out = []
    for token in range(len(pieces)):
        if made.stopped:
            break
        given_out.append(made.append(token))
    return [*given_out, made.finish()], made


def naive(text: str, stops: Sequence[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """Read the whole text letter by letter; the first stop to be complete ends it, the longest of several.

    One that ends within the first `after` letters does not count.
    """
    for end in range(after + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), LETTERS, STOPS, st.booleans())
def test_streamed_text_equals_a_naive_search_of_the_whole(pieces, rest, stops, include):
    given_out, made = stream(pieces, rest, stop=stops, include_stop_str_in_output=include)
    expected = naive("".join(pieces) + rest, stops, include)
    assert ("".join(given_out), made.stop_reason) == expected
    assert made.text == expected[0]
    assert made.stopped == (expected[1] is not None)


@given(st.lists(LETTERS, max_size=8), LETTERS, STOPS, st.booleans())
def test_nothing_given_out_is_ever_taken_back(pieces, rest, stops, include):
    """Whatever comes later: after every token the text so far begins the final text of every continuation."""
    made = TextStream(Pieces(pieces), SamplingParams(stop=stops, include_stop_str_in_output=include))
    for token in range(len(pieces)):
        if made.stopped:
            break
        made.append(token)
        seen = "".join(pieces[: token + 1])
        for more in ["", *stops, *(stop[1:] for stop in stops), "ab", "ba"]:
            assert naive(seen + more, stops, include)[0].startswith(made.text)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(pieces, stops):
    made = TextStream(Pieces(pieces), SamplingParams(stop=stops))
    for token in range(len(pieces)):
        if made.stopped:
            break
        made.append(token)
        held = "".join(pieces[: token + 1])[len(made.text) :]
        assert made.stopped or held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.lists(LETTERS, min_size=1, max_size=8), LETTERS, STOPS, st.integers(0, 8))
def test_stops_count_only_once_min_tokens_have_passed(pieces, rest, stops, min_tokens):
    given_out, made = stream(pieces, rest, stop=stops, min_tokens=min_tokens)
    early = "".join(pieces[:min_tokens])
    whole = "".join([*pieces, rest])
    expected = naive(whole, stops, False, len(early)) if len(pieces) > min_tokens or not min_tokens else (whole, None)
    assert ("".join(given_out), made.stop_reason) == expected


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "axb"), (3, "axbxc"), (4, "axbxc"), (5, "axbxcx")]
)
def test_a_stop_string_ends_the_text_in_the_first_token_in_which_the_end_could_come(min_tokens, text):
    """With min_tokens=2 that is the third token, as in vLLM."""
    pieces, made = stream(["a", "x", "bx", "c", "x"], stop="x", min_tokens=min_tokens)
    assert "".join(pieces) == made.text == text
    assert made.stopped == (min_tokens < 5)


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    """Tokens of a text cut anywhere, also within characters, here and there with bytes that are no UTF-8."""
    parts = st.text(WIDE, max_size=6).map(str.encode) | st.binary(max_size=2)
    data = b"".join(draw(st.lists(parts, max_size=5)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Some that occur in the text, some that only begin in it, some that do not."""
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 4), st.text(WIDE, max_size=1))
    inside = places.map(lambda place: text[place[0] : place[0] + place[1]] + place[2])
    stops = inside | st.text([*WIDE, "\ufffd"], min_size=1, max_size=3)
    return draw(st.lists(stops.filter(bool), max_size=3))


@settings(max_examples=EXAMPLES)
@given(st.data(), cut_bytes(), st.booleans(), st.integers(0, 10))
def test_text_of_split_characters_equals_a_naive_search_of_the_whole(data, tokens, include, min_tokens):
    """The stream is fed to the end, past any stop: nothing of a stop or behind it may come out."""
    whole = b"".join(tokens).decode("utf-8", "replace")
    stops = data.draw(stops_for(whole))
    early = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens[:min_tokens]))
    counts = len(tokens) > min_tokens or not min_tokens
    expected = naive(whole, stops, include, len(early)) if counts else (whole, None)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    made = TextStream(Detokenizer(lambda token_id: tokens[token_id], Leading(count=0)), params)
    given_out = ""
    for token in range(len(tokens)):
        given_out += made.append(token)
        assert expected[0].startswith(given_out)
    given_out += made.finish()
    assert (given_out, made.text, made.stop_reason) == (expected[0], *expected)


@pytest.mark.parametrize("include", [False, True])
def test_tokens_behind_a_stop_change_nothing(include):
    """A step may bring several tokens at once, and the stop may be complete before the last of them."""
    made = TextStream(
        Pieces(["a", "STOP", "b", "STOP c"], "d"),
        SamplingParams(stop=["STOP", "c"], include_stop_str_in_output=include),
    )
    assert [*map(made.append, range(4)), made.finish(), made.finish()] == ["a", "STOP" * include, "", "", "", ""]
    assert (made.text, made.stop_reason) == ("aSTOP" if include else "a", "STOP")


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("abcd", ("cd", "bc"), (1, "bc")),  # complete first
        ("xabc", ("bc", "abc"), (1, "abc")),  # complete together: the longest
        ("abcde", ("abcde", "bc"), (1, "bc")),  # begun first, but complete later
        ("aXbXc", ("X",), (1, "X")),
        ("abc", ("d", "abcd"), None),
        ("abc", (), None),
        ("", ("a",), None),
    ],
)
def test_the_stop_that_is_complete_first_wins_and_of_several_the_longest(text, stops, found):
    assert first_stop(text, stops) == found


@pytest.mark.parametrize(
    ("text", "stops", "size"),
    [
        ("hello </", ("</s>",), 2),
        ("hello", ("</s>",), 0),
        ("hello", (), 0),
        ("aa", ("aab",), 2),
        ("ba", ("aab", "bac"), 2),
        ("x", ("x",), 0),  # a complete stop is not held back, it is found
        ("\n", ("\n\n",), 1),
    ],
)
def test_the_longest_end_that_begins_a_stop_is_held_back(text, stops, size):
    assert held_back(text, stops) == size


def test_part_of_a_stop_never_reaches_the_stream():
    assert stream(["Hi", "<", "/", "s", ">", "more"], stop="</s>")[0] == ["Hi", "", "", "", "", ""]


def test_what_looked_like_a_stop_is_given_out_when_it_breaks_off():
    assert stream(["Hi", "<", "/", "b", ">"], stop="</s>")[0] == ["Hi", "", "", "</b", ">", ""]


def test_what_was_held_back_is_given_out_at_the_end():
    assert stream(["Hi", "<", "/"], stop="</s>")[0] == ["Hi", "", "", "</"]


def test_a_stop_in_the_middle_of_a_piece_cuts_it():
    pieces, made = stream(["one STOP two"], stop="STOP")
    assert pieces == ["one ", ""]
    assert made.stop_reason == "STOP"


def test_the_stop_string_is_kept_if_asked_for_and_nothing_behind_it():
    assert stream(["one ST", "OP two"], stop="STOP", include_stop_str_in_output=True)[0] == ["one ", "STOP", ""]


def test_a_stop_completed_by_the_last_half_character_counts():
    pieces, made = stream(["wait"], rest="é", stop="é")
    assert pieces == ["wait", ""]
    assert made.stop_reason == "é"


def test_without_a_tokenizer_there_is_no_text():
    made = TextStream(None, SamplingParams(stop="a"))
    assert [made.append(3), made.finish(), made.text] == ["", "", ""]
    assert not made.stopped

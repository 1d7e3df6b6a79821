import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.openai.parsers.deltas import message_of
from dcpjax.openai.parsers.reasoning import ReasoningParser, opens_reasoning


def parts(*pieces: str, opened: bool = False) -> tuple[str | None, str | None]:
    """(Reasoning, content)."""
    parser = ReasoningParser(opened=opened)
    message = message_of([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])
    return message.get("reasoning_content"), message["content"]


def test_reasoning_is_kept_apart_from_the_answer():
    assert parts("<think>\nIs it a\n or b?\n</think>\n\nIt is b. ") == ("Is it a\n or b?", "It is b. ")
    assert parts("\n<think>\n\n</think>\n\nYes") == (None, "Yes")
    assert parts("<think>a</think>") == ("a", None)


@pytest.mark.parametrize("text", ["Is it a?\n</think>\n\nYes", "<think>\nIs it a?</think>Yes"])
def test_a_prompt_can_begin_the_reasoning(text):
    assert parts(text, opened=True) == ("Is it a?", "Yes")


def test_reasoning_that_never_ends_is_all_there_is():
    assert parts("<think>\nIs it a </thi") == ("Is it a </thi", None)
    assert parts("<thin", opened=True) == ("<thin", None)
    assert parts("", opened=True) == (None, "")


@pytest.mark.parametrize("text", ["Yes", " \n", "<thin", "Write <think>a</think>", "a</think>b", "<thinking>"])
def test_without_a_mark_at_the_start_all_is_content(text):
    assert parts(text) == (None, text)


def test_a_second_mark_is_content():
    assert parts("<think>a<think>b</think>c</think><think>d</think>") == ("a<think>b", "c</think><think>d</think>")


def test_the_end_of_a_prompt_tells_whether_it_has_begun_reasoning():
    assert opens_reasoning("<｜Assistant｜><think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")


PARTS = st.sampled_from(["<think>", "</think>", "<thi", "</th", "ink>", " ", "\n", "a", "b<", "/"])


def whole_parts(text: str, *, opened: bool) -> tuple[str | None, str | None]:
    """What `parts` gives, from the whole text."""
    begun = re.match(r"\s*<think>", text)
    if not begun and not opened:
        return None, text
    reasoning, mark, content = text[begun.end() if begun else 0 :].partition("</think>")
    reasoning, content = (reasoning.strip() if mark else reasoning.lstrip()), content.lstrip()
    return reasoning or None, content or (None if reasoning else "")


@given(st.lists(PARTS, max_size=10), st.booleans())
def test_a_text_gives_the_same_parts_however_it_is_cut(pieces, opened):
    text = "".join(pieces)
    assert parts(*pieces, opened=opened) == whole_parts(text, opened=opened)
    assert parts(*text, opened=opened) == whole_parts(text, opened=opened)

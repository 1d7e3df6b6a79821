from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import character_model

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.frontend import prompt_length
from dcpjax.frontend.intake import Intake
from dcpjax.frontend.prompt_length import CUT_TOKENS, PIECE, check_text, texts_of

LONG = "ab " * 3_400_000  # ten million characters


class Counting:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens)


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    files = open_model(character_model(tmp_path_factory.mktemp("model") / "tiny"))
    tokenizer = files.tokenizer()
    assert tokenizer is not None
    return Intake(files, EngineConfig(), Counting(tokenizer), vocab_size=101, max_model_len=100)  # type: ignore[arg-type]


def refusal(intake: Intake, prompt: object, *, chat: bool = False) -> str:
    params = SamplingParams()
    submission = intake.chat_submission(0, prompt, params) if chat else intake.submission(0, prompt, params)
    return submission.error or ""


@pytest.mark.parametrize(
    "prompt", [LONG, {"prompt": LONG}, [{"role": "user", "content": LONG}]], ids=["text", "dict", "chat"]
)
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenised(intake, prompt):
    intake.tokenizer.characters = 0
    assert refusal(intake, prompt, chat=isinstance(prompt, list)) == (
        "a prompt must hold at most 99 tokens (max_model_len=100 leaves one to generate), "
        f"but the first {PIECE} of its {len(LONG)} characters hold at least {PIECE - CUT_TOKENS}"
    )
    assert intake.tokenizer.characters == PIECE


class Unread(Sequence):
    """Ten million token ids that nobody may look at."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index):
        raise AssertionError("read")


@pytest.mark.parametrize("ids", [Unread(), np.broadcast_to(0, 10**12)], ids=["list", "array"])
def test_of_token_ids_only_the_number_is_read(intake, ids):
    assert refusal(intake, ids).endswith(f", but holds {ids.size if isinstance(ids, np.ndarray) else len(ids)}")


@given(st.text("ab ", max_size=200), st.integers(1, 60))
def test_a_text_is_refused_only_if_it_holds_too_many_tokens(text, max_model_len):
    """With a tokenizer of words, which cutting breaks in two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_length, "PIECE", 8)
        patch.setattr(prompt_length, "CUT_TOKENS", 1)
        patch.setattr(prompt_length, "LIKELY_CHARACTERS", 1)
        try:
            check_text(text, max_model_len, str.split)
        except ValueError:
            assert len(text.split()) >= max_model_len


def test_cutting_a_text_adds_fewer_tokens_than_are_let_pass(smollm2_path: Path):
    tokenizer = Tokenizer.from_gguf(smollm2_path)
    text = (Path(__file__).parents[2] / "README.md").read_text()
    for size in (100, 1000):
        pieces = [tokenizer.encode(text[start : start + size]) for start in range(0, len(text), size)]
        assert sum(map(len, pieces)) <= len(tokenizer.encode(text)) + CUT_TOKENS * len(pieces) // 2


def test_every_text_of_a_conversation_is_found():
    conversation = [{"role": "r", "content": [{"type": "t", "text": "x"}, "y"]}, {"tool_calls": ({"a": ["z", 1]},)}]
    assert sorted(texts_of(conversation)) == ["r", "t", "x", "y", "z"]

"""Which ids of the logits a request may hold and choose: those of tokens, and the model's ends."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.frontend.intake import Intake


def tokenizer() -> Tokenizer:
    """a is 0, b is 2, and nothing is 1."""
    backend = Backend(models.BPE({"a": 0, "b": 2}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


def intake(vocab_size: int = 6, tokenizer: Tokenizer | None = None) -> Intake:
    ends: dict[str, Any] = {"eos_token_id": [4, 9]}
    files = ModelFiles(
        path=Path("model"),
        config={},
        generation_config=ends,
        tensors=lambda: pytest.fail("reads no weights"),
        tokenizer=lambda: None,
    )
    return Intake(files, EngineConfig(), tokenizer, vocab_size=vocab_size, max_model_len=64)


def test_tokens_and_the_models_ends_are_known_and_nothing_else():
    assert intake(tokenizer=tokenizer()).known.tolist() == [True, False, True, False, True, False]


def test_without_a_tokenizer_all_ids_are_known():
    assert intake().known.all()


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([0, 2, 4], None),
        ([0, 1, 3], "token ids must belong to tokens, but the tokenizer has none for 1; leave it out"),
        ([0, 5], "token ids must be in [0, 4], but one is 5"),
    ],
)
def test_a_prompt_that_holds_an_id_of_no_token_is_an_error_that_names_it(prompt, sentence):
    assert intake(tokenizer=tokenizer()).submission(0, prompt, SamplingParams()).error == sentence


def test_a_text_whose_token_lies_beyond_the_logits_is_refused():
    small = intake(vocab_size=2, tokenizer=tokenizer())
    assert small.submission(0, "a", SamplingParams()).error is None
    assert small.submission(0, "ab", SamplingParams()).error == "token ids must be in [0, 0], but one is 2"

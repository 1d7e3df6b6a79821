"""Prompts in, sampled tokens to text: with a Llama-like tokenizer and no model."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import RequestOutput
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.checkpoint.tokenizer import Tokenizer
from dcpjax.engine.result import TokenScores
from dcpjax.frontend.completion import RunningPrompt
from dcpjax.frontend.intake import Intake
from dcpjax.openai.request import RequestBody
from dcpjax.openai.response import response_body

MERGES = [("▁", "O"), ("n", "c"), ("nc", "e"), ("▁O", "nce"), ("▁", "u"), ("p", "o"), ("po", "n"), ("▁u", "pon")]
MERGES += [("▁", "a"), ("▁", "▁")]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [*SPECIAL, *BYTES, *"▁Oncepuoatim,", *(left + right for left, right in MERGES)]
VOCABULARY = {word: number for number, word in enumerate(dict.fromkeys(WORDS))}


def sentencepiece(**model: Any) -> Backend:
    backend = Backend(models.BPE(VOCABULARY, MERGES, byte_fallback=True, unk_token="<unk>", **model))
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def llama() -> Backend:
    """Llama 2's: the normalizer puts a space before the text, the last step of the decoder takes it away."""
    backend = sentencepiece(fuse_unk=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def metaspace(scheme: str) -> Backend:
    backend = sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return backend


def byte_level() -> Backend:
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


BACKENDS = {
    "llama": llama,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "byte level": byte_level,
}


def tokenizer(name: str = "llama") -> Tokenizer:
    backend = BACKENDS[name]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, {"eos_token": "</s>"})


def intake(tokens: Tokenizer, config: dict[str, Any] | None = None, **generation_config: Any) -> Intake:
    files = ModelFiles(
        path=Path("model"),
        config=config or {},
        generation_config=generation_config,
        tensors=lambda: pytest.fail("no weight is read"),
        tokenizer=lambda: tokens,
    )
    return Intake(files, EngineConfig(), tokens, vocab_size=tokens.vocab_size, max_model_len=100)


def completed(tokens: Tokenizer, prompt: Any, ids: list[int], at_once: int = 1, **options: Any) -> RequestOutput:
    """The result when the model samples `ids`, so many a step."""
    taken = intake(tokens)
    running = RunningPrompt(taken.submission(0, prompt, SamplingParams(**options)), deque())
    assert running.submission.error is None
    taken.start(running, streamed=True)
    completion, request = running.completions[0], running.completions[0].request
    for position, token in enumerate(request.prompt_token_ids[1:], start=1):
        request.prompt_scores[position] = TokenScores(token, -0.5, 1, [token], [-0.5])
    for first in range(0, len(ids), at_once):
        if completion.output.finish_reason is not None:
            break
        for token in ids[first : first + at_once]:
            request.output_token_ids.append(token)
            request.scores.append(TokenScores(token, -0.5, 1, [token], [-0.5]))
        completion.take_tokens()
    assert [event.token_ids for event in running.events if event.token_ids] == [
        [each] for each in running.output.outputs[0].token_ids
    ]
    assert request.output_token_ids == completion.output.token_ids
    if completion.output.finish_reason is None:
        completion.abort()
    return running.output


def ids_of(tokens: Tokenizer, text: str) -> list[int]:
    return tokens.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", ["Once upon a time", "Once  upon", "Once\nupon a, é", " Once upon"])
def test_prompt_and_text_together_are_the_text_of_all_ids(name, text):
    tokens = tokenizer(name)
    ids = ids_of(tokens, text)
    for cut in range(1, len(ids)):
        prompt = tokens.decode(ids[:cut])
        if "\ufffd" not in prompt:
            assert prompt + completed(tokens, ids[:cut], ids[cut:]).outputs[0].text == tokens.decode(ids)


def test_the_first_word_behind_a_prompt_keeps_its_space():
    tokens = tokenizer()
    upon = VOCABULARY["▁upon"]
    assert completed(tokens, "Once", [upon]).outputs[0].text == " upon"
    assert completed(tokens, "", [upon]).outputs[0].text == "upon"  # what decoding all ids gives
    assert completed(tokens, "", [upon], skip_special_tokens=False).outputs[0].text == " upon"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_with_a_space_is_found_in_the_first_token(include):
    found = completed(
        tokenizer(),
        "Once",
        [VOCABULARY["▁upon"], VOCABULARY["▁a"]],
        stop=[" up"],
        include_stop_str_in_output=include,
    ).outputs[0]
    assert (found.text, found.stop_reason) == (" up" if include else "", " up")
    assert found.token_ids == [VOCABULARY["▁upon"]]


@pytest.mark.parametrize("at_once", [2, 3, 8])
@pytest.mark.parametrize("stop", [[], [" up"], ["n a"], ["a"]])
def test_tokens_that_come_together_give_what_they_give_one_by_one(stop, at_once):
    tokens = tokenizer()
    ids = ids_of(tokens, "Once upon é a 日 a")
    expected = completed(tokens, "Once", ids, stop=stop, logprobs=1).outputs[0]
    assert completed(tokens, "Once", ids, at_once, stop=stop, logprobs=1).outputs[0] == expected


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("prompt", ["Once", ""])
def test_decoded_tokens_join_to_the_text_and_their_offsets_point_into_it(name, prompt):
    tokens = tokenizer(name)
    ids = [*ids_of(tokens, "Once upon é a 日 a"), 2]
    asked = RequestBody(kind="completion", sampling=SamplingParams(logprobs=1), prompt=prompt)
    prompt_ids = ids_of(tokens, prompt) or [1]
    output = completed(tokens, prompt_ids, ids, logprobs=1)
    choice = response_body(asked, [output], name="1", model="m", created=0)["choices"][0]
    listed, text = choice["logprobs"]["tokens"], choice["text"]
    assert "".join(listed[:-1]) == text  # the last has the name of the end token, which is not in the text
    assert choice["logprobs"]["text_offset"] == [len("".join(listed[:place])) for place in range(len(ids))]
    assert tokens.decode(prompt_ids) + text == tokens.decode([*prompt_ids, *ids])


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_of_log_probabilities_join_to_the_bytes_of_the_text(name):
    tokens = tokenizer(name)
    ids = [*ids_of(tokens, "Once é日🙂"), 2]
    asked = RequestBody(kind="chat", sampling=SamplingParams(logprobs=1), messages=[{"role": "user", "content": "a"}])
    output = completed(tokens, "Once", ids, logprobs=1)
    choice = response_body(asked, [output], name="1", model="m", created=0)["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == choice["message"]["content"].encode()
    assert content[-1]["bytes"] == []
    assert [239, 191, 189] not in [entry["bytes"] for entry in content]
    assert json.dumps(content)


def test_part_of_a_character_has_its_own_byte_and_the_last_part_the_character():
    first, second = VOCABULARY["<0xC3>"], VOCABULARY["<0xA9>"]
    listed = completed(tokenizer(), "Once", [first, second], logprobs=0).outputs[0].logprobs
    entries = [listed[0][first], listed[1][second]]
    assert [(entry.decoded_token, entry.token_bytes) for entry in entries] == [("", b"\xc3"), ("é", b"\xa9")]


def test_prompt_log_probabilities_join_to_the_prompt():
    prompt = "Once upon é a"
    listed = completed(tokenizer(), prompt, [2], prompt_logprobs=0).prompt_logprobs
    assert listed[0] is None
    entries = [entry for each in listed[1:] for entry in each.values()]
    assert "".join(entry.decoded_token for entry in entries) == prompt
    assert b"".join(entry.token_bytes for entry in entries) == prompt.encode()


@pytest.mark.parametrize("prompt", ["Once", ""])
def test_guided_text_follows_its_grammar_behind_any_prompt(prompt):
    pytest.importorskip("llguidance")
    tokens = tokenizer()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["upon", " a"]))
    submission = intake(tokens).submission(0, prompt, params)
    assert submission.error is None
    assert submission.make_guide is not None
    guide, text = submission.make_guide(), tokens.detokenizer(True, submission.prompt_token_ids)
    shown = ""
    while not guide.is_finished:
        taken = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))[-1]
        guide.advance(int(taken))
        shown += text.append(int(taken))
    assert shown in ("upon", " a")


def test_every_end_token_that_any_file_names_ends_a_request():
    tokens = tokenizer()
    taken = intake(tokens, {"eos_token_id": [5, 6], "text_config": {"eos_token_id": 9}}, eos_token_id=7)
    running = RunningPrompt(taken.submission(0, "Once", SamplingParams(stop_token_ids=[8])), deque())
    taken.start(running, streamed=True)
    assert running.completions[0].request.end_token_ids == {2, 5, 6, 7, 8, 9}

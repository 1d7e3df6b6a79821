"""Code written for vLLM: what docs/vllm.md says is tried row by row, and run on a tiny model."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import TEMPLATE, character_model

import dcpjax
from dcpjax import LLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from dcpjax.api import vllm_options
from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import CompletionOutput, PromptWarning, RequestOutput

PAGE = (Path(__file__).parent.parent / "docs" / "vllm.md").read_text()
GREEDY = SamplingParams(temperature=0, max_tokens=6)
MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 2**20,
}


def rows(section: str, table: int) -> list[list[str]]:
    """The cells below the head of the section's table of this number."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in tables[table].splitlines()[2:]]


def names(section: str, table: int) -> list[str]:
    return [row[0].strip("`| ") for row in rows(section, table)]


NEUTRAL = {
    "ENGINE": rows("Options of `LLM`", 1),
    "SAMPLING": rows("`SamplingParams`", 1),
    "CALL": rows("Calls", 1),
    "PROMPT": rows("Calls", 2),
}


def neutral_rows() -> Iterator[tuple[str, str, list[Any], str]]:
    for kind, listed in NEUTRAL.items():
        for name, accepted, instead in listed:
            values = [ast.literal_eval(value) for value in re.findall("`([^`]*)`", accepted)]
            yield kind, name.strip("`"), values, instead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, progress=False, **OPTIONS)


# --- the page


def use(kind: str, name: str, value: Any, llm: LLM) -> None:
    """Give the option to whatever takes it; raises ValueError if it is refused."""
    if kind == "ENGINE":
        assert EngineConfig.from_options({name: value}) == EngineConfig()
    elif kind == "SAMPLING":
        assert SamplingParams(**{name: value}) == SamplingParams.from_options({name: value}) == SamplingParams()
    elif kind == "CALL":
        assert llm.generate([], **{name: value}) == llm.chat([], **{name: value}) == []
    else:
        submission = llm.intake.submission(0, {"prompt": "a", name: value}, SamplingParams())
        if submission.error:
            raise ValueError(submission.error)


@pytest.mark.parametrize(("kind", "name", "values", "instead"), list(neutral_rows()))
def test_an_option_is_accepted_where_the_page_says_and_refused_elsewhere(kind, name, values, instead, llm) -> None:
    for value in values:
        use(kind, name, value, llm)
    with pytest.raises(ValueError, match=re.escape(f"{name} must be ")) as refusal:
        use(kind, name, "something else", llm)
    assert str(refusal.value).endswith(f"but is 'something else'; {instead}")


@pytest.mark.parametrize("kind", NEUTRAL)
def test_the_page_has_every_option_that_the_code_accepts(kind: str) -> None:
    assert {row[0].strip("`") for row in NEUTRAL[kind]} == set(getattr(vllm_options, kind))


def test_options_that_are_the_same_exist() -> None:
    engine, sampling = names("Options of `LLM`", 0), names("`SamplingParams`", 0)
    assert set(engine) - {"model"} <= {field.name for field in dataclasses.fields(EngineConfig)}
    assert sorted(sampling) == sorted(field.name for field in dataclasses.fields(SamplingParams))


def test_calls_and_attributes_are_what_the_page_says(llm: LLM) -> None:
    assert all(callable(getattr(llm, name)) for name in names("Calls", 0))
    listed = dict(zip(names("Calls", 3), (row[1].rstrip("| ") for row in rows("Calls", 3)), strict=True))
    assert listed == vllm_options.ATTRIBUTES
    for name, instead in listed.items():
        with pytest.raises(AttributeError, match=re.escape(f"LLM has no attribute '{name}'; {instead}")):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'generat'$"):
        llm.generat  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_results_have_the_fields_on_the_page() -> None:
    text = PAGE.split("## Results\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(\w+)(?:\(\))?`", text)) - {"RequestOutput", "CompletionOutput", "raw_logprobs"}
    assert listed == {name for kind in (RequestOutput, CompletionOutput) for name in public(kind)}


def public(kind: type) -> set[str]:
    own = {name for name in vars(kind) if not name.startswith("_")} - {"html_row"}
    return own | {field.name for field in dataclasses.fields(kind)}


# --- values under vLLM's names


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("dtype", "half", "bfloat16"),
        ("dtype", "float16", "bfloat16"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", "float16", "bfloat16"),
        ("load_format", "safetensors", "auto"),
        ("seed", None, 0),
        ("block_size", None, 256),
        ("max_num_seqs", None, 256),
    ],
)
def test_a_value_of_vllm_is_understood(name: str, given: Any, meant: Any) -> None:
    assert getattr(EngineConfig.from_options({name: given}), name) == meant


def test_a_dtype_of_torch_is_understood() -> None:
    class Dtype:  # prints as torch's do; torch is no requirement of the tests
        def __str__(self) -> str:
            return "torch.float32"

    assert EngineConfig.from_options({"dtype": Dtype()}).dtype == "float32"


@pytest.mark.parametrize("options", [{"enable_chunked_prefil": True}, {"qantization": None}])
def test_a_misspelt_option_is_still_unknown(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown option"):
        EngineConfig.from_options(options)


def test_module_level_functions_accept_the_same_options(folder: Path) -> None:
    neutral = {"enforce_eager": True, "best_of": 1, "trust_remote_code": False}
    (result,) = dcpjax.generate(folder, "abc", progress=False, max_tokens=2, temperature=0, **neutral, **OPTIONS)
    assert result.error is None
    with pytest.raises(ValueError, match="quantization must be None, but is 'awq'"):
        dcpjax.generate(folder, "abc", quantization="awq")


# --- running


def test_a_script_for_vllm_runs(folder: Path) -> None:
    llm = LLM(
        model=str(folder),
        tokenizer=str(folder),
        trust_remote_code=False,
        enforce_eager=True,
        quantization=None,
        revision=None,
        swap_space=4,
        **OPTIONS,
        progress=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, best_of=1, spaces_between_special_tokens=True)
    prompts = [TextPrompt(prompt="abc"), TokensPrompt(prompt_token_ids=[5, 6, 7], prompt="shown"), "abc"]
    results = llm.generate(prompts, params, use_tqdm=False, lora_request=None)
    assert [result.prompt for result in results] == ["abc", "shown", "abc"]
    assert results[0].outputs[0].token_ids == results[2].outputs[0].token_ids
    assert all(result.outputs[0].finished() for result in results)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<u>hello<a>"
    assert llm.generate(text, params)[0].outputs[0].text == llm.chat(MESSAGES, params)[0].outputs[0].text


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokenizer = llm.get_tokenizer()
    assert tokenizer("abc")["input_ids"] == llm.tokenizer.encode("abc")
    assert set(tokenizer("abc")) == {"input_ids", "attention_mask"}
    assert tokenizer.decode([5, 6]) == llm.tokenizer.decode([5, 6])
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id) == (99, "<e>", 0)
    assert llm.get_tokenizer() is tokenizer
    batch = tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2) if tokenizer.pad_token else None
    assert batch is None or len(batch["input_ids"]) == 2
    assert llm.tokenizer.encode("abcd") == tokenizer("abcd")["input_ids"]


def test_a_tokenizer_of_another_folder_is_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    other = LLM(folder, tokenizer=tmp_path, progress=False, **OPTIONS)
    assert other.tokenizer is not None
    assert other.tokenizer.eos_token_id is None  # named in tokenizer_config.json, which is not there
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer must name a folder with tokenizer\.json"):
        LLM(folder, tokenizer=tmp_path, progress=False, **OPTIONS)


def test_params_may_change_while_a_stream_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream("abc", params)
    first = next(stream)
    params.max_tokens = 1
    assert sum(len(event.token_ids) for event in [first, *stream]) == 6
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 1


def test_default_params_are_the_callers_own(llm: LLM) -> None:
    llm.get_default_sampling_params().max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens == 16


def test_a_chat_takes_another_template(llm: LLM) -> None:
    template = "<a>" + TEMPLATE
    plain, other = llm.chat(MESSAGES, GREEDY)[0], llm.chat(MESSAGES, GREEDY, chat_template=template)[0]
    assert other.prompt_token_ids == [2, *plain.prompt_token_ids]
    with pytest.warns(PromptWarning, match="chat_template must be the text of a template"):
        llm.chat(MESSAGES, GREEDY, chat_template=Path("x"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("kept", "left"), [(2, 2), (9, 9), (50, 10), (-1, 10)])
def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM, kept: int, left: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=kept)
    (result,) = llm.generate("0123456789", params)
    assert llm.tokenizer is not None
    assert result.prompt_token_ids == llm.tokenizer.encode("0123456789")[-left:]


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = [5 + number % 90 for number in range(llm.max_model_len + 20)]
    text = llm.tokenizer.decode(ids)
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=-1)
    for result in llm.generate([ids, np.array(ids), text], params):
        assert result.prompt_token_ids == ids[-(llm.max_model_len - 1) :]
    (chat,) = llm.chat([{"role": "user", "content": text}], params)
    assert len(chat.prompt_token_ids) == llm.max_model_len - 1


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({"prompt": "a", "cach_salt": "x"}, "unknown key of a prompt 'cach_salt'; did you mean cache_salt?"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data must be None or {}"),
        ({"prompt_token_ids": [5], "prompt": 3}, "prompt must be a text, but is int"),
    ],
)
def test_a_prompt_with_other_keys_is_refused(llm: LLM, prompt: Any, sentence: str) -> None:
    bad, good = llm.generate([prompt, "abc"], GREEDY)
    assert sentence in (bad.error or "")
    assert good.error is None


def test_no_two_requests_of_an_llm_have_the_same_id(llm: LLM) -> None:
    results = [*llm.generate(["a", "", "b"], GREEDY), *llm.generate("a", GREEDY), *llm.chat(MESSAGES, GREEDY)]
    assert len({result.request_id for result in results}) == len(results)


def test_a_single_prompt_that_cannot_be_run_warns(llm: LLM) -> None:
    with pytest.warns(PromptWarning, match="the prompt was not run: a prompt must hold at least one token") as warned:
        llm.generate("", GREEDY)
    assert Path(warned[0].filename) == Path(__file__)
    with pytest.warns(PromptWarning, match="was not run") as warned:
        list(llm.stream("", GREEDY))
    assert Path(warned[0].filename) == Path(__file__)


def test_an_argument_of_a_call_that_nobody_knows_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="unknown option 'use_tqmd'; did you mean use_tqdm"):
        llm.generate("a", GREEDY, use_tqmd=False)


# --- chosen tokens' log-probabilities


def test_named_tokens_have_the_log_probabilities_of_the_whole_vocabulary(folder: Path) -> None:
    llm = LLM(folder, progress=False, max_logprobs=-1, **OPTIONS)
    everything = SamplingParams(temperature=0, max_tokens=3, logprobs=-1)
    some = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[50, 7, 60])
    whole, named, plain = llm.generate(["abc", "abc", "abc"], [everything, some, GREEDY])
    assert plain.outputs[0].logprobs is None
    assert whole.outputs[0].logprobs is not None
    assert named.outputs[0].logprobs is not None
    for token, all_of_them, found in zip(
        named.outputs[0].token_ids, whole.outputs[0].logprobs, named.outputs[0].logprobs, strict=True
    ):
        assert set(found) == {token, 50, 7, 60}
        assert {key: (entry.rank, entry.decoded_token) for key, entry in found.items()} == {
            key: (all_of_them[key].rank, all_of_them[key].decoded_token) for key in found
        }
        assert [entry.logprob for entry in found.values()] == pytest.approx([all_of_them[key].logprob for key in found])
    assert named.outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logprob_token_ids": []}, "logprob_token_ids must hold at least one token id, but is empty"),
        ({"logprob_token_ids": range(129)}, "logprob_token_ids must hold at most 128 token ids, but holds more"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids must be at least 0, but is -1; use 0"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs must be None or 2, the number of logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, but is 0; use 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SamplingParams(**options)


# --- beam search


def logprobs_after(llm: LLM, ids: list[int]) -> dict[int, float]:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    logprobs = llm.generate([{"prompt_token_ids": ids}], params)[0].outputs[0].logprobs
    assert logprobs is not None
    return {token: entry.logprob for token, entry in logprobs[0].items()}


def by_hand(llm: LLM, prompt: list[int], width: int, count: int) -> list[tuple[list[int], float]]:
    """Beam search without an end of sequence, straight from its definition."""
    beams = [(prompt, 0.0)]
    for _ in range(count):
        longer = [
            ([*ids, token], total + value) for ids, total in beams for token, value in logprobs_after(llm, ids).items()
        ]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return beams


def test_beams_are_those_of_the_definition(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    results = llm.beam_search([[5, 6, 7], [40, 41]], params, use_tqdm=False)
    assert llm.tokenizer is not None
    for prompt, result in zip([[5, 6, 7], [40, 41]], results, strict=True):
        expected = by_hand(llm, prompt, 3, 4)
        assert [sequence.tokens for sequence in result.sequences] == [tokens for tokens, _ in expected]
        assert [sequence.cum_logprob for sequence in result.sequences] == pytest.approx(
            [total for _, total in expected]
        )
        assert all(sequence.text == llm.tokenizer.decode(sequence.tokens) for sequence in result.sequences)
        assert all(len(sequence.logprobs) == 4 for sequence in result.sequences)
        assert {sequence.finish_reason for sequence in result.sequences} == {"length"}


def test_one_beam_is_greedy(llm: LLM) -> None:
    (result,) = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    (greedy,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert result.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_a_bad_prompt_leaves_the_beams_of_others(llm: LLM) -> None:
    bad, good = llm.beam_search(["", "abc"], BeamSearchParams(beam_width=2, max_tokens=2))
    assert (bad.sequences, "at least one token" in (bad.error or "")) == ([], True)
    assert (len(good.sequences), good.error) == (2, None)


def test_more_beams_than_log_probabilities_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logprobs must be at most max_logprobs=20, but is 22"):
        llm.beam_search("abc", BeamSearchParams(beam_width=11, max_tokens=2))

"""The public interface on a tiny model with a tokenizer of one character per token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS
from small_models import character_model

import dcpjax
from dcpjax import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from dcpjax.runtime.memory import block_bytes_per_device

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def make(folder: Path, **options: Any) -> LLM:
    options = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 2**20,
    } | options
    return LLM(folder, progress=False, **options)


def tokens(results: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


@pytest.fixture(autouse=True)
def nothing_left_behind(llm: LLM) -> Any:
    yield
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_used == 0
    llm.engine.blocks.check_integrity()


def test_results_come_in_order_and_one_for_each_prompt(llm: LLM) -> None:
    prompts = ["abc", [5, 6, 7], {"prompt": "xyz"}, {"prompt_token_ids": [9]}]
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in results] == ["abc", None, "xyz", None]
    assert all(result.finished and len(result.outputs[0].token_ids) <= 8 for result in results)
    for prompt, result in zip(prompts, results, strict=True):
        assert tokens(llm.generate([prompt], GREEDY)) == [result.outputs[0].token_ids]


def test_one_string_or_one_list_of_ids_is_one_prompt(llm: LLM) -> None:
    assert len(llm.generate("abc", GREEDY)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("", "a prompt must hold at least one token, but is empty"),
        ([], "a prompt must hold at least one token, but is empty"),
        ([101], "token ids must be in [0, 98], but one is 101"),
        ([5, 99, 100], "token ids must be in [0, 98], but one is 99"),
        ([-1], "token ids must be in [0, 98], but one is -1"),
        ([10**30], f"token ids must be in [0, 98], but one is {10**30}"),
        ([1.5], "token ids must be integers, but one is 1.5"),
        (7, "a prompt must be a string or a list of token ids, but is int"),
        (None, "a prompt must be a string or a list of token ids, but is NoneType"),
        ({"text": "x"}, "a prompt must have the key 'prompt' or 'prompt_token_ids', but has ['text']"),
        (b"abc", "a prompt must be a string or a list of token ids, but is bytes"),
        (np.array(5), "a prompt must be a string or a list of token ids, but is ndarray"),
        ([5] * 512, "a prompt must hold at most 511 tokens (max_model_len=512 leaves one to generate), but holds 512"),
    ],
)
def test_a_bad_prompt_gives_one_error_and_the_others_finish(llm: LLM, bad: Any, sentence: str) -> None:
    before, broken, after = llm.generate(["abc", bad, "xyz"], GREEDY)
    assert broken.outputs[0].finish_reason == "error"
    assert broken.error is not None
    assert sentence in broken.error
    assert broken.finished
    assert before.outputs[0].finish_reason != "error"
    assert after.outputs[0].finish_reason != "error"


def test_ninety_nine_results_and_one_error(llm: LLM) -> None:
    prompts: list[Any] = [[3 + number % 90] for number in range(100)]
    prompts[37] = [1000]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    assert [number for number, result in enumerate(results) if result.error] == [37]


def test_whitespace_and_special_tokens_are_prompts(llm: LLM) -> None:
    for prompt in (" ", "\n", "<u><a>"):
        assert llm.generate(prompt, GREEDY)[0].error is None


def test_the_same_prompt_twice_gives_the_same_tokens(llm: LLM) -> None:
    first, second = llm.generate(["abcabc", "abcabc"], GREEDY)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert len(first.outputs[0].token_ids) > 0


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (result,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert llm.tokenizer is not None
    assert result.outputs[0].text == llm.tokenizer.decode(result.outputs[0].token_ids)


def test_a_stream_adds_up_to_the_result(llm: LLM) -> None:
    prompts = ["abc", "hello there", "z"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    results = llm.generate(prompts, params)
    texts, ids, reasons = [""] * 3, [[] for _ in prompts], [None] * 3
    for event in llm.stream(prompts, params):
        texts[event.prompt_index] += event.text
        ids[event.prompt_index] += event.token_ids
        reasons[event.prompt_index] = event.finish_reason
    assert texts == [result.outputs[0].text for result in results]
    assert ids == tokens(results)
    assert reasons == [result.outputs[0].finish_reason for result in results]


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(["abc", "def"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.blocks.num_used > 0
    stream.close()
    assert llm.engine.blocks.num_used == 0
    assert llm.generate("abc", GREEDY)[0].error is None


def test_two_streams_may_be_read_in_turn(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = llm.generate(["abc", "xyz"], params)
    one, other = llm.stream("abc", params), llm.stream("xyz", params)
    texts = ["", ""]
    for left, right in zip(one, other, strict=False):
        texts[0] += left.text
        texts[1] += right.text
    texts[0] += "".join(event.text for event in one)
    texts[1] += "".join(event.text for event in other)
    assert texts == [result.outputs[0].text for result in expected]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    stop = whole.text[10:12]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop])
    (result,) = llm.generate("abc", params)
    (output,) = result.outputs
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids


def test_a_stop_token_is_reported_and_kept_out_of_the_text(llm: LLM) -> None:
    whole = llm.generate("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    stop = whole.token_ids[7]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    (result,) = llm.generate("abc", params)
    (output,) = result.outputs
    first = whole.token_ids.index(stop)
    assert output.token_ids == whole.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert llm.tokenizer is not None
    assert output.text == llm.tokenizer.decode(whole.token_ids[:first])


def test_min_tokens_puts_off_the_end(llm: LLM) -> None:
    whole = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0].outputs[0]
    stop = whole.token_ids[0]
    ended = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[stop]))
    assert len(ended[0].outputs[0].token_ids) == 1
    later = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, min_tokens=4, stop_token_ids=[stop]))
    assert len(later[0].outputs[0].token_ids) >= 4
    assert stop not in later[0].outputs[0].token_ids[:4]


def test_a_seed_makes_draws_independent_of_order_and_company(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    other = SamplingParams(temperature=1.0, top_k=5, max_tokens=10, ignore_eos=True)
    alone = tokens(llm.generate(["abc"], seeded))[0]
    assert tokens(llm.generate(["xyz", "abc"], [other, seeded]))[1] == alone
    assert tokens(llm.generate(["abc", "xyz", "q"], [seeded, other, other]))[0] == alone


def test_several_completions_use_following_seeds(llm: LLM) -> None:
    params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    (result,) = llm.generate("abc", SamplingParams(n=3, seed=5, **params))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    singly = [tokens(llm.generate("abc", SamplingParams(seed=seed, **params)))[0] for seed in (5, 6, 7)]
    assert [output.token_ids for output in result.outputs] == singly
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3


def test_the_engine_seed_decides_where_a_request_has_none(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, same, other = make(folder, seed=1), make(folder, seed=1), make(folder, seed=2)
    assert tokens(one.generate(["abc", "abc"], params)) == tokens(same.generate(["abc", "abc"], params))
    assert tokens(one.generate(["abc"], params)) != tokens(other.generate(["abc"], params))


def test_a_pool_so_small_that_requests_are_preempted_gives_the_same_tokens(folder: Path, llm: LLM) -> None:
    prompts = [[10 + number] * 20 for number in range(6)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    per_block = block_bytes_per_device(llm.runner.model)
    small = make(folder, kv_cache_memory_bytes=6 * per_block)
    results = small.generate(prompts, params)
    assert tokens(results) == tokens(llm.generate(prompts, params))
    preempted = [result.metrics.preemptions for result in results if result.metrics is not None]
    assert sum(preempted) > 0
    assert small.engine.blocks.num_used == 0


def test_a_request_that_can_never_fit_is_an_error_with_numbers(folder: Path, llm: LLM) -> None:
    small = make(folder, kv_cache_memory_bytes=2 * block_bytes_per_device(llm.runner.model))
    assert small.max_model_len == 32
    fits, too_long = small.generate([[5] * 31, [5] * 32], SamplingParams(temperature=0, max_tokens=4))
    assert fits.outputs[0].finish_reason == "length"
    assert "a prompt must hold at most 31 tokens (max_model_len=32" in (too_long.error or "")


def test_one_hundred_calls_of_varied_sizes_leave_nothing_behind(llm: LLM) -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        lengths = generator.integers(1, 30, size=int(generator.integers(1, 6)))
        results = llm.generate(
            [[7] * int(length) for length in lengths], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        )
        assert [len(output) for output in tokens(results)] == [2] * len(lengths)


def test_an_exception_in_a_step_fails_its_requests_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tokens(llm.generate("abc", GREEDY))
    with monkeypatch.context() as broken:
        broken.setattr(llm.runner.programs, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        (result,) = llm.generate("abc", GREEDY)
    assert result.error == "RuntimeError: out of memory"
    assert tokens(llm.generate("abc", GREEDY)) == good


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tokens(llm.generate("abc", GREEDY))

    def interrupted(*_: Any) -> Any:
        for array in (llm.runner.cache[0].keys, llm.runner.cache[1].values):
            array.delete()  # as if the donated cache was lost midway
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(llm.runner.programs, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "xyz"], GREEDY)
    assert llm.engine.blocks.num_used == 0
    assert tokens(llm.generate("abc", GREEDY)) == good


def test_non_finite_logits_end_a_request_with_an_error(folder: Path) -> None:
    broken = make(folder)
    poisoned = broken.runner.weights.norm.at[:].set(np.nan)
    broken.runner.weights = replace(broken.runner.weights, norm=poisoned)
    (result,) = broken.generate("abc", GREEDY)
    assert result.error == "the model's logits are not finite (NaN or infinity)"


def test_chat_goes_through_the_template_of_the_checkpoint(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert result.prompt_token_ids == [1, *result.prompt_token_ids[1:3], 2]
    assert len(llm.chat([[{"role": "user", "content": "hi"}]] * 3, GREEDY)) == 3


def test_control_tokens_in_a_message_are_plain_text(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "a<a>b<u>"}], GREEDY)
    assert result.prompt_token_ids[0] == 1
    assert result.prompt_token_ids[-1] == 2
    assert not {0, 1, 2} & set(result.prompt_token_ids[1:-1])


def test_a_bad_conversation_is_an_error_of_its_own(llm: LLM) -> None:
    good, bad = llm.chat([[{"role": "user", "content": "x"}], [{"role": "king", "content": "x"}]], GREEDY)
    assert good.error is None
    assert "must be one of system" in (bad.error or "")


def test_options_of_one_request_do_not_fail_its_neighbours(llm: LLM) -> None:
    wrong = SamplingParams(temperature=0, stop_token_ids=[101], min_tokens=2)
    bad, good = llm.generate(["abc", "xyz"], [wrong, GREEDY])
    assert bad.error == "stop_token_ids must be in [0, 100], but one is 101"
    assert tokens([good]) == tokens(llm.generate("xyz", GREEDY))


def test_ids_that_no_token_has_are_never_sampled_on_any_mesh(llm: LLM, folder: Path) -> None:
    """The logits are 101 wide, the tokenizer has 99 tokens: of 1,600 even draws about 30 would be of the other two."""
    params = SamplingParams(temperature=100, n=8, seed=1, max_tokens=200, ignore_eos=True)
    found = tokens(llm.generate("abc", params))
    assert set().union(*found) == set(range(99))
    other = make(folder, tensor_parallel_size=3, decode_context_parallel_size=1)
    assert tokens(other.generate("abc", params)) == found


def test_free_and_guided_requests_choose_from_the_same_ids(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    free = SamplingParams(temperature=1e38, n=3, seed=2, max_tokens=100, ignore_eos=True)
    guided = replace(free, structured_outputs=StructuredOutputsParams(regex="(?s:.)*"))
    assert set().union(*tokens(llm.generate(["abc", "abc"], [free, guided]))) <= set(range(99))


def test_log_probabilities_list_every_token_and_no_other_id(folder: Path) -> None:
    own = make(folder, max_logprobs=-1)
    (result,) = own.generate("ab", SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1))
    listed = [*(result.outputs[0].logprobs or []), *(result.prompt_logprobs or [])[1:]]
    assert len(listed) == 2
    for entries in listed:
        assert set(entries or ()) == set(range(99))
        assert sorted(entry.rank or 0 for entry in (entries or {}).values()) == list(range(1, 100))


def test_a_list_of_allowed_ids_that_no_token_has_is_that_prompts_error(llm: LLM) -> None:
    bad, good = llm.generate(["abc", "xyz"], [replace(GREEDY, allowed_token_ids=[5, 100]), GREEDY])
    assert bad.error == "allowed_token_ids must be in [0, 98], but one is 100"
    assert good.error is None


NOTHING_LEFT = [
    ({"allowed_token_ids": [21], "bad_words": ["1"]}, "allowed_token_ids, bad_words"),
    ({"allowed_token_ids": [0], "min_tokens": 3}, "allowed_token_ids, min_tokens"),
]


@pytest.mark.parametrize(("options", "names"), NOTHING_LEFT, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e38])
def test_a_request_whose_options_leave_no_token_is_an_error_and_its_neighbours_are_the_same(
    llm: LLM, options: dict[str, Any], names: str, temperature: float
) -> None:
    banned = SamplingParams(temperature=temperature, **options)
    free = tokens(llm.generate(["abc", "xyz"], GREEDY))
    before, bad, after = llm.generate(["abc", "q", "xyz"], [GREEDY, banned, GREEDY])
    assert bad.error == (
        f"the options {names} must leave a token to choose, but ban every one for token number 1; loosen one of them"
    )
    assert bad.outputs[0].token_ids == []
    assert tokens([before, after]) == free


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"temperature": 1e38}, {"repetition_penalty": 1.2e-38}, {"temperature": 3.4e38}])
def test_extreme_numbers_warn_nobody_and_choose_only_what_is_allowed(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**options, allowed_token_ids=[20, 21], max_tokens=6, min_tokens=6)
    (found,) = tokens(llm.generate([[20, 21, 0]], params))
    assert len(found) == 6
    assert set(found) <= {20, 21}


@pytest.mark.parametrize("messages", ["What is it?", {"role": "user", "content": "x"}, None, 5])
def test_messages_that_are_no_list_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages must be a list of"):
        llm.chat(messages)


@pytest.mark.parametrize("prompts", [None, 5, b"hi"])
def test_prompts_that_are_no_list_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be a prompt or a list of prompts"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [5, {"max_tokens": 4}, [None], [5]])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams or a list of them"):
        llm.generate(["abc"], params)


@pytest.mark.parametrize("moment", ["_launch", "_collect", "_apply"])
def test_an_interrupt_after_a_step_costs_other_streams_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = tokens(llm.generate("abc", params))[0]
    stream = llm.stream("abc", params)
    seen = [token for _ in range(2) for token in next(stream).token_ids]
    original = getattr(llm.engine, moment)

    def interrupted(*given: Any) -> Any:
        original(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("xyz", params)
    seen += [token for event in stream for token in event.token_ids]
    assert seen == expected


def test_a_stream_is_watched_token_by_token_and_a_call_for_its_results(llm: LLM, monkeypatch: Any) -> None:
    seen, add = [], llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request: (seen.append(request.streamed), add(request)))
    llm.generate(["abc", "xyz"], GREEDY)
    list(llm.stream("abc", GREEDY))
    assert seen == [False, False, True]
    assert not llm.engine.scheduler.limits.prefill_budget.always


# --- prefix cache, log-probabilities and other options


def test_a_prompt_given_twice_is_found_in_the_cache_and_answered_alike(llm: LLM) -> None:
    prompt = [3 + number % 90 for number in range(64)]
    assert llm.reset_prefix_cache()
    (cold,), (warm,) = (llm.generate([prompt], GREEDY) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)  # whole blocks, without the last token
    assert tokens([warm]) == tokens([cold])
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_prompts_of_another_salt_share_nothing(llm: LLM) -> None:
    prompt = [5 + number % 80 for number in range(40)]

    def cached(**extra: Any) -> int:
        return llm.generate([{"prompt_token_ids": prompt, **extra}], GREEDY)[0].num_cached_tokens

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(), cached(cache_salt="a")] == [0, 0, 0, 32]
    assert "cache_salt must be a string" in (llm.generate([{"prompt": "abc", "cache_salt": 5}], GREEDY)[0].error or "")


def test_completions_of_one_prompt_compute_it_once(folder: Path) -> None:
    own = make(folder)
    prompt = [3 + number % 90 for number in range(60)]
    (several,) = own.generate([prompt], SamplingParams(n=3, temperature=1, seed=5, max_tokens=4, ignore_eos=True))
    assert own.stats().prefix_hits == 2 * 48
    alone = [
        own.generate([prompt], SamplingParams(temperature=1, seed=5 + index, max_tokens=4, ignore_eos=True))[0]
        for index in range(3)
    ]
    assert tokens([several]) == tokens(alone)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16, "max_mixed_prefill_tokens": 8},
        {"kv_cache_memory_bytes": 2**16, "max_model_len": 128},  # preempts
        {"tensor_parallel_size": 3, "decode_context_parallel_size": 1},
    ],
    ids=str,
)
def test_tokens_and_log_probabilities_are_the_same_with(llm: LLM, folder: Path, options: dict[str, Any]) -> None:
    prompts = [[3 + (7 * number + place) % 90 for place in range(8 + 9 * number)] for number in range(6)]
    prompts += [prompts[5][:40], prompts[5]]
    params = [
        SamplingParams(temperature=number % 2, seed=number, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=2)
        for number in range(len(prompts))
    ]
    expected, found = llm.generate(prompts, params), make(folder, **options).generate(prompts, params)
    assert tokens(found) == tokens(expected)
    for ours, theirs in zip(expected, found, strict=True):
        for mine, other in zip(ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert list(mine) == list(other)
            for token in mine:
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=5e-5)


SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def scores(result: RequestOutput) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in each.items()} for each in result.outputs[0].logprobs or []]


def eight_prompts(seed: int) -> list[list[int]]:
    """Eight prompts of eight tokens: one step of 64 for all of them, then steps of eight."""
    return np.random.default_rng(seed).integers(3, 93, (8, 8)).tolist()


def test_where_padded_shapes_are_the_same_neighbours_and_order_change_no_bit(llm: LLM) -> None:
    prompts = eight_prompts(seed=1)
    expected = [scores(result) for result in llm.generate(prompts, SCORED)]
    assert [scores(result) for result in llm.generate(prompts[::-1], SCORED)] == expected[::-1]
    for seed in range(2, 6):
        place = seed % 8
        neighbours = eight_prompts(seed)
        mixed = [*neighbours[:place], prompts[0], *neighbours[place + 1 :]]
        assert scores(llm.generate(mixed, SCORED)[place]) == expected[0]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"enable_prefix_caching": False}], ids=str)
def test_where_padded_shapes_are_the_same_other_blocks_and_options_change_no_bit(
    llm: LLM, folder: Path, options: dict[str, Any]
) -> None:
    own, prompts = make(folder, **options), eight_prompts(seed=1)
    own.generate([[3] * 80], GREEDY)  # takes blocks, so that the next ones lie elsewhere
    assert list(map(scores, own.generate(prompts, SCORED))) == list(map(scores, llm.generate(prompts, SCORED)))


def test_a_hit_changes_no_bit_where_both_prompts_fill_the_same_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gathered queries: gathered keys are added up in an order that depends on where the chunk begins."""
    monkeypatch.setattr(llm.runner, "shapes", replace(llm.runner.shapes, prompt_exchange=None))
    prompt = [3 + 5 * number % 90 for number in range(31)]
    assert llm.reset_prefix_cache()
    (cold,), (warm,) = (llm.generate([prompt], SCORED) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    assert scores(warm) == scores(cold)


def test_log_probabilities_of_prompt_and_answer_are_those_of_one_pass_over_all(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (answer,) = llm.generate([[3 + number % 90 for number in range(50)]], asked)
    whole = answer.prompt_token_ids + answer.outputs[0].token_ids
    (again,) = llm.generate([whole], asked)
    assert again.prompt_logprobs is not None
    assert answer.prompt_logprobs is not None
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(whole)
    assert answer.outputs[0].logprobs is not None
    seen = answer.prompt_logprobs[1:] + answer.outputs[0].logprobs
    for token, mine, other in zip(whole[1:], seen, again.prompt_logprobs[1:], strict=True):
        assert mine is not None
        assert other is not None
        assert mine[token].logprob == pytest.approx(other[token].logprob, abs=5e-5)
        assert mine[token].rank == other[token].rank
    chosen = zip(answer.outputs[0].logprobs, answer.outputs[0].token_ids, strict=True)
    total = sum(entry[token].logprob for entry, token in chosen)
    assert answer.outputs[0].cumulative_logprob == pytest.approx(total)


def test_more_log_probabilities_than_the_engine_gives_are_refused(llm: LLM) -> None:
    (result,) = llm.generate(["abc"], SamplingParams(logprobs=21))
    assert "logprobs must be at most" in (result.error or "")


def test_a_guided_answer_is_one_of_the_choices_and_its_neighbours_are_free(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    guided = SamplingParams(
        temperature=1, seed=3, max_tokens=16, structured_outputs=StructuredOutputsParams(choice=["yes", "no way"])
    )
    free = tokens(llm.generate("abc", GREEDY))
    first, second, third = llm.generate(["xyz", "abc", "q"], [guided, GREEDY, guided])
    assert {first.outputs[0].text, third.outputs[0].text} <= {"yes", "no way"}
    assert first.outputs[0].finish_reason == third.outputs[0].finish_reason == "stop"
    assert tokens([second]) == free


def test_a_structure_that_cannot_be_followed_is_that_prompts_error(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    wrong, good = llm.generate(["abc", "abc"], [bad, GREEDY])
    assert "regex must be one that can be followed" in (wrong.error or "")
    assert good.error is None


def test_bad_words_never_come(llm: LLM) -> None:
    free = llm.generate("abc", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].text
    words = [free[:2], free[3]]
    barred = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=words)
    text = llm.generate("abc", barred)[0].outputs[0].text
    assert not any(word in text for word in words)


def test_priorities_need_their_policy_and_order_the_queue(llm: LLM, folder: Path) -> None:
    with pytest.raises(ValueError, match="priority must be 0 while scheduling_policy is 'fcfs'"):
        llm.generate(["abc"], GREEDY, priority=3)
    own = make(folder, scheduling_policy="priority", max_num_seqs=1)
    results = own.generate(["abc", "abd", "abe"], GREEDY, priority=[2, 0, 1])
    moments = [result.metrics.first_scheduled_time for result in results if result.metrics]
    assert sorted(range(3), key=lambda index: moments[index]) == [1, 2, 0]


def test_the_engines_statistics_tell_what_was_done(folder: Path) -> None:
    own = make(folder)
    own.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, ignore_eos=True))
    stats = own.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (5, 8)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert len(stats.tokens_per_rank) == 2


def test_parameters_must_be_one_or_as_many_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params must be one or as many as the 2 prompts, but are 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_generate_takes_engine_and_sampling_options(folder: Path, llm: LLM) -> None:
    results = dcpjax.generate(folder, ["abc"], dtype="float32", temperature=0, max_tokens=8, compilation_cache=False)
    assert tokens(results) == tokens(llm.generate("abc", GREEDY))


def test_the_moments_of_a_request_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("abc", GREEDY)[0].metrics
    assert metrics is not None
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    bare = LLM(GOLDENS / "smollm2", progress=False, dtype="float32", kv_cache_memory_bytes=2**20, block_size=16)
    by_text, by_ids = bare.generate(["abc", [5, 6, 7]], GREEDY)
    assert "a text prompt needs a tokenizer" in (by_text.error or "")
    assert by_ids.error is None
    assert by_ids.outputs[0].text == ""

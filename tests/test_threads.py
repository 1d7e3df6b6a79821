"""One `LLM` in eight threads: each call gives what it gives alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from small_models import character_model

from dcpjax import LLM, SamplingParams, StructuredOutputsParams

THREADS = 8
ROUNDS = 2
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True)
STOPPED = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=["a", "e", "Q"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        character_model(tmp_path_factory.mktemp("model") / "tiny"),
        progress=False,
        dtype="float32",
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=2**20,
    )


def generated(llm: LLM, number: int) -> object:
    prompts = [f"line {number}", "the same for all", [5 + number] * 40]
    results = llm.generate(prompts, [GREEDY, DRAWN, STOPPED], use_tqdm=False)
    assert all(result.finished for result in results)
    return [(output.token_ids, output.text, output.finish_reason) for result in results for output in result.outputs]


def chatted(llm: LLM, number: int) -> object:
    conversations = [[{"role": "user", "content": f"{number}{word}"}] for word in ("one", "two")]
    return [result.outputs[0].token_ids for result in llm.chat(conversations, GREEDY)]


def streamed(llm: LLM, number: int) -> object:
    return "".join(event.text for event in llm.stream(f"stream {number}", GREEDY))


def closed(llm: LLM, number: int) -> object:
    stream = llm.stream_chat([{"role": "user", "content": str(number)}], GREEDY)
    seen = [next(stream).text for _ in range(1 + number)]
    stream.close()
    return seen


def thrown_into(llm: LLM, number: int) -> object:
    stream = llm.stream(str(number), GREEDY)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())
    return llm.stats().num_blocks, llm.reset_prefix_cache() in (True, False)


def guided(llm: LLM, number: int) -> object:
    pytest.importorskip("llguidance")
    choice = StructuredOutputsParams(choice=["yes", "no way", str(number)])
    return llm.generate("abc", SamplingParams(temperature=0, structured_outputs=choice))[0].outputs[0].text


CALLS: list[Callable[[LLM, int], object]] = [generated, chatted, streamed, closed, thrown_into, guided]


def test_every_call_in_eight_threads_gives_what_it_gives_alone(llm: LLM) -> None:
    alone = [[call(llm, number) for call in CALLS] for number in range(THREADS)]
    together, before = Barrier(THREADS), llm.stats()

    def work(number: int) -> list[list[object]]:
        together.wait()
        order = CALLS[number % len(CALLS) :] + CALLS[: number % len(CALLS)]
        found = [{call: call(llm, number) for call in order} for _ in range(ROUNDS)]
        return [[each[call] for call in CALLS] for each in found]

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS))) == [[expected] * ROUNDS for expected in alone]
    after = llm.stats()
    tokens, steps = after.generated_tokens - before.generated_tokens, after.steps - before.steps
    assert tokens > 2 * steps, "the threads do not share a batch"
    assert (after.num_running, after.num_waiting, after.num_used_blocks) == (0, 0, 0)
    llm.engine.blocks.check_integrity()


def test_a_failing_step_reaches_every_thread_once_and_the_next_calls_succeed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, together = llm.runner.launch, Barrier(THREADS)

    def fails_for_all(step):
        if len(step) == THREADS:
            raise RuntimeError("out of memory")
        return launch(step)

    def work(number: int) -> str | None:
        together.wait()
        (result,) = llm.generate([[3 + number] * 4], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        return result.error

    expected = generated(llm, 0)
    with monkeypatch.context() as broken, ThreadPoolExecutor(THREADS) as pool:
        broken.setattr(llm.runner, "launch", fails_for_all)
        assert set(pool.map(work, range(THREADS))) == {"RuntimeError: out of memory"}
    assert generated(llm, 0) == expected
    assert llm.stats().num_used_blocks == 0

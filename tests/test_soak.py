"""Many requests through the real engine: nothing leaks, nothing compiles after the warm-up, nobody's answer changes.

`requests` counts those after the warm-up; the full size is 5,000.
"""

import random
import resource
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from harness import GOLDENS, compilations

from dcpjax import LLM, SamplingParams
from dcpjax.frontend.completion import RunningPrompt

OPTIONS = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 24 * 4096,  # 24 blocks: too few for eight long requests at once
    "max_model_len": 192,
    "warmup": "all",
}


class Traffic:
    """Requests of random lengths, a third of which begin alike; one in ten is given up on its way."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.dice = llm, random.Random(seed)
        self.vocab = llm.runner.model.config.vocab_size
        self.heads = [self._tokens(self.dice.choice((16, 40, 64))) for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(3, self.vocab) for _ in range(count)]

    def jobs(self, count: int) -> Iterator[RunningPrompt]:
        for index in range(count):
            head = self.dice.choice(self.heads) if self.dice.random() < 0.3 else []
            prompt = head + self._tokens(self.dice.randint(1, 60))
            drawn = self.dice.random() < 0.5
            params = SamplingParams(
                temperature=0.9 if drawn else 0.0,
                top_p=0.9 if drawn else 1.0,
                seed=index,
                max_tokens=self.dice.randint(1, 40),
                ignore_eos=True,
            )
            yield RunningPrompt(self.llm.intake.submission(index, prompt, params), deque())

    def run(self, count: int, *, every: int = 1) -> list[RunningPrompt]:
        """All jobs to their ends, at most sixteen on their way. Returns each `every`th unless it was given up."""
        kept, running, waiting = list[RunningPrompt](), list[RunningPrompt](), self.jobs(count)
        while True:
            running += islice(waiting, 16 - len(running))
            if not running:
                return kept
            for job in running:
                if not job.completions:
                    self.llm.start(job)
            self.llm.advance()
            if self.dice.random() < 0.03:
                self.llm.abandon([running.pop(self.dice.randrange(len(running)))])
            kept += [job for job in running if job.output.finished and job.submission.index % every == 0]
            running = [job for job in running if not job.output.finished]


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_after_many_requests_nothing_has_leaked_and_each_answer_is_its_own(count: int) -> None:
    llm = LLM(GOLDENS / "llama3", progress=False, **OPTIONS)
    Traffic(llm, seed=1).run(60)  # compiles what drawn tokens need
    resident = _resident_bytes()
    with compilations() as compiled:
        jobs = Traffic(llm, seed=2).run(count, every=max(1, count // max(4, count // 100)))
    assert compiled == []
    assert _resident_bytes() < 1.05 * resident
    assert llm.engine.blocks.num_used == 0
    llm.engine.blocks.check_integrity()
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert jobs
    for job in jobs:
        (alone,) = llm.generate([job.submission.prompt_token_ids], job.submission.params)
        assert alone.outputs[0].token_ids == job.output.outputs[0].token_ids


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * resource.getpagesize()

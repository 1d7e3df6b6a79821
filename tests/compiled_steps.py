"""A step's compiled programs and the collectives in them: what tests of several rooms look at."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial as bind
from typing import Any

import numpy as np
from harness import golden_runner

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.engine.request import Request
from dcpjax.engine.result import StepResult
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.batch import build
from dcpjax.runtime.logit_rows import SampledRows
from dcpjax.runtime.programs import head_weights
from dcpjax.runtime.runner import Runner

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


make_runner = bind(golden_runner, "llama3")


def scheduled(lengths: list[int], count: int = 1, **params: Any) -> list[Scheduled]:
    options = SamplingParams(**{"temperature": 0, **params})
    return [
        Scheduled(
            Request(number=number, prompt_token_ids=[3] * length, params=options, max_tokens=4),
            length - count,
            count,
            list(range(8 * number, 8 * number + 8)),
            True,
        )
        for number, length in enumerate(lengths)
    ]


def with_gathered_queries(runner: Runner) -> Runner:
    """The runner, from now on with the queries of prompts gathered and never their keys."""
    runner.shapes = replace(runner.shapes, prompt_exchange=None)
    return runner


def run(runner: Runner, step: list[Scheduled]) -> StepResult:
    return runner.collect(runner.launch(step))


def compiled(runner: Runner, step: list[Scheduled]) -> Any:
    """The forward program of a step."""
    batch = build(step, runner.shapes, runner.geometry)
    return runner.programs.forward.lower(runner.weights, runner.cache, runner.latest, batch).compile()


def compiled_choice(runner: Runner, step: list[Scheduled]) -> Any:
    """The program that chooses a step's next tokens."""
    batch = build(step, runner.shapes, runner.geometry)
    choice = SampledRows.of(step, batch, runner.shapes, runner.model.config.vocab_size)
    assert choice is not None
    hidden = np.zeros((len(choice.indices), runner.model.config.hidden_size), np.float32)
    return runner.programs.sample.lower(head_weights(runner.weights), hidden, runner.latest, choice.options).compile()


def collectives(program: Any) -> Counter[str]:
    return Counter(kind for kind, _ in instructions(program.as_text()))


def instructions(text: str) -> list[tuple[str, str]]:
    """(collective, its result type) of every collective instruction."""
    pattern = re.compile(rf"= (\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [(kind, result) for result, kind in pattern.findall(text)]


# per layer, besides the all-reduce after o_proj and the one after the MLP
MERGE_COLLECTIVES = {
    "ag_rs": {"all-gather": 2, "reduce-scatter": 1},  # query and lse; features
    "a2a": {"all-gather": 1, "all-to-all": 1},  # query; out with lse
    "psum": {"all-gather": 1, "all-reduce": 2},  # query; largest lse, then weights and out together
}

"""Single steps of the real runner, without scheduler and engine, for the benchmarks that time steps."""

from collections.abc import Callable, Sequence
from typing import Any

from dcpjax.api.config import EngineConfig
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import ModelFiles
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.runtime.runner import Runner, load_runner

Step = Callable[[], None]


def make_runner(files: ModelFiles, dtype: str, batch: int, context: int, **options: Any) -> Runner:
    """A runner whose cache holds `batch` requests of `context` tokens."""
    options |= {"dtype": dtype, "max_num_seqs": batch}
    options["kv_cache_memory_bytes"] = _cache_bytes(files, dtype, batch, context)
    return load_runner(files, EngineConfig.from_options(options))


def _cache_bytes(files: ModelFiles, dtype: str, batch: int, context: int) -> int:
    config = files.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return values * (4 if dtype == "float32" else 2) * batch * (context + 256)


def greedy_request(number: int, context: int) -> Request:
    """A request of `context` prompt tokens."""
    greedy = SamplingParams(temperature=0)
    return Request(number=number, prompt_token_ids=[1] * context, params=greedy, max_tokens=1)


def decode_step(runner: Runner, contexts: Sequence[int], blocks: Sequence[int] | None = None) -> Step:
    """A decode step in which request i computes the last token of its contexts[i] tokens.

    The requests take their blocks from `blocks` in order, by default 0, 1, 2 ... What the cache holds does not
    matter for the time.
    """
    free = list(range(runner.sizes.num_blocks)) if blocks is None else list(blocks)
    step = []
    for number, context in enumerate(contexts):
        count = runner.geometry.blocks(context)
        own, free = free[:count], free[count:]
        step.append(Scheduled(greedy_request(number, context), context - 1, 1, own, True))
    return lambda: runner.collect(runner.launch(step)) and None

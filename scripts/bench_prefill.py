"""The prefill of one prompt beside other runtimes: the same weights and length, alternating in one process.

    python scripts/bench_prefill.py --model smollm2-135m --lengths 128 512 2048 --dtype float32 bfloat16

Ours takes the prompt as one chunk and, if it is longer than a step of the engine, in the engine's chunks as well.
Prints the median of each side with the 10th and 90th percentile and tokens per second; of ours also which fraction of
the machine's matrix-multiply rate its operations need, of the others theirs over ours. That rate is the best of
several square products, by jax and by torch. `--llama-cpp` is that of `bench_decode.py`.
"""

import argparse
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from bench_decode import (
    Step,
    add_options,
    alternate,
    check_options,
    greedy_request,
    heading,
    machine,
    make_rivals,
    make_runner,
    rival_names,
    row,
    seconds,
    versions,
)

from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.engine.limits import step_limits
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models import flops
from dcpjax.models.config import ModelConfig, from_hf

SQUARES = (1024, 2048, 4096)  # rows of the products that measure the machine


def main() -> None:
    options = _options()
    files = open_model(options.model)
    config = from_hf(files.config)
    print(f"{machine()}; {versions(options)}")
    for dtype in options.dtype:
        rates = matmul_rates(dtype, torch=not options.alone)
        print(f"{dtype} products: {', '.join(f'{name} {rate / 1e9:.0f} GFLOP/s' for name, rate in rates.items())}")
        print(f"dtype     tokens  chunk {heading(rival_names(options), 'of peak')}")
        rivals = make_rivals(files, dtype, options)
        for length in options.lengths:
            others = [rival.prefill(length) for rival in rivals]
            for chunk in chunks(config, length):
                steps = [our_prefill(files, dtype, length, chunk), *others]
                times = alternate(steps, options.rounds, calls=1, warm_up=2)
                rate = prefill_operations(config, length) / statistics.median(times[0])
                line = row(times, length, rate / max(rates.values()))
                print(f"{dtype:9} {length:6} {chunk:6} {line}", flush=True)


def our_prefill(files: ModelFiles, dtype: str, length: int, chunk: int) -> Step:
    """A whole prompt in chunks; the host waits for the last one alone."""
    runner = make_runner(files, dtype, 1, length, max_num_batched_tokens=chunk)
    request, blocks = greedy_request(0, length), list(range(runner.geometry.blocks(length)))
    steps = [
        [Scheduled(request, start, min(chunk, length - start), blocks, start + chunk >= length)]
        for start in range(0, length, chunk)
    ]

    def run() -> None:
        *_, last = [runner.launch(step) for step in steps]
        runner.collect(last)

    return run


def chunks(config: ModelConfig, length: int) -> list[int]:
    """The whole prompt, and the engine's own step if that is shorter."""
    limits = step_limits(
        config,
        jax.default_backend(),
        max_num_seqs=1,
        max_num_batched_tokens=None,
        max_mixed_prefill_tokens=None,
        enable_prefix_caching=False,
    )
    return [length, limits.max_num_batched_tokens] if limits.max_num_batched_tokens < length else [length]


def prefill_operations(config: ModelConfig, length: int) -> int:
    """Additions and multiplications: each token through the layers and past all before it, one through the head."""
    pairs = length * (length + 1) // 2
    head = config.vocab_size * config.hidden_size
    return 2 * (flops.per_token(config) * length + flops.per_position(config) * pairs + head)


def matmul_rates(dtype: str, *, torch: bool) -> dict[str, float]:
    """Operations per second of the best of some large products, by library."""
    rates = {"jax": _jax_rate(dtype)}
    return rates | {"torch": _torch_rate(dtype)} if torch else rates


def _jax_rate(dtype: str) -> float:
    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    operands = [jnp.ones((size, size), dtype) for size in SQUARES]
    return max(_rate(lambda x=x: product(x).block_until_ready(), x.shape[0]) for x in operands)


def _torch_rate(dtype: str) -> float:
    import torch

    operands = [torch.ones((size, size), dtype=getattr(torch, dtype)) for size in SQUARES]
    return max(_rate(lambda x=x: x @ x.T, x.shape[0]) for x in operands)


def _rate(product: Any, size: int) -> float:
    product()
    return 2 * size**3 / min(seconds(product) for _ in range(7))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    return check_options(parser, parser.parse_args())


if __name__ == "__main__":
    main()

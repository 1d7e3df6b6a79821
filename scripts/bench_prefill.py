"""The prefill of one prompt beside other runtimes: the same weights and length, alternating in one process.

    python scripts/bench_prefill.py --model smollm2-135m --lengths 128 512 2048 --dtype float32 bfloat16

Our runtime computes the prompt as one chunk and, if it is longer than a step of the engine, also in the engine's
chunks. Prints for each dtype, length and chunk the median time of each runtime, its 10th and 90th percentile and tokens
per second. Ours is followed by the fraction of the machine's matrix-multiply rate that it reaches, each other runtime
by its time over ours. The rate is that of the fastest of several square products, by jax and by torch. `--llama-cpp`
is explained in `bench_decode.py`.
"""

import argparse
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from measuring import alternate, heading, machine, row, seconds
from other_runtimes import add_options, check_options, make_runtimes, runtime_names, versions
from runner_steps import Step, greedy_request, make_runner

from dcpjax.checkpoint.model_files import ModelFiles, open_model
from dcpjax.engine.limits import step_limits
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models import flops
from dcpjax.models.config import ModelConfig, from_hf

SQUARES = (1024, 2048, 4096)  # rows of the square matrices whose products measure the machine


def main() -> None:
    options = _options()
    files = open_model(options.model)
    config = from_hf(files.config)
    print(f"{machine()}; {versions(options)}")
    for dtype in options.dtype:
        rates = matmul_rates(dtype, torch=not options.alone)
        print(f"{dtype} products: {', '.join(f'{name} {rate / 1e9:.0f} GFLOP/s' for name, rate in rates.items())}")
        print(f"dtype     tokens  chunk {heading(runtime_names(options), 'of peak')}")
        runtimes = make_runtimes(files, dtype, options)
        for length in options.lengths:
            others = [runtime.prefill(length) for runtime in runtimes]
            for chunk in chunks(config, length):
                steps = [our_prefill(files, dtype, length, chunk), *others]
                times = alternate(steps, options.rounds, calls=1, warm_up=2)
                rate = prefill_operations(config, length) / statistics.median(times[0])
                line = row(times, length, rate / max(rates.values()))
                print(f"{dtype:9} {length:6} {chunk:6} {line}", flush=True)


def our_prefill(files: ModelFiles, dtype: str, length: int, chunk: int) -> Step:
    """The prefill of a prompt in chunks; the host waits for the last chunk only."""
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
    """Chunk sizes: the whole prompt, and the most tokens of an engine's step if that is shorter."""
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
    """Additions and multiplications of a prefill: all tokens in the layers and in attention, the last in the head."""
    pairs = length * (length + 1) // 2
    head = config.vocab_size * config.hidden_size
    return 2 * (flops.per_token(config) * length + flops.per_position(config) * pairs + head)


def matmul_rates(dtype: str, *, torch: bool) -> dict[str, float]:
    """Operations per second of the fastest of some square products, by library."""
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

"""Decode steps in several layouts of the same devices: time, cache bytes and exchanged bytes per device.

    python scripts/bench_layouts.py --layouts 8,1 2,4 1,8 --context 1024 8192 --batch 1 8

Small models with dummy weights (MLA, and GQA with two KV heads) run on this machine's devices, on CPU virtual ones.
For each model, context and batch the layouts alternate. Prints for each layout the median step with its 10th and 90th
percentile, the cache in use and the bytes sent over dcp per step; ratios are to the first layout.
"""

import argparse
import statistics
from typing import Any

import jax
from bench_trace import SHAPES
from measuring import alternate, layout, machine
from runner_steps import decode_step

from dcpjax.api.config import EngineConfig
from dcpjax.checkpoint.model_files import open_model
from dcpjax.models.exchange import exchange
from dcpjax.runtime.memory import block_bytes_per_device
from dcpjax.runtime.runner import Runner, load_runner
from dcpjax.sharding.merge_cost import Merge


def main() -> None:
    options = _options()
    print(f"{machine()}; jax {jax.__version__}")
    print(f"{options.merge} merge, {options.rounds} x 5 steps; bytes per device: cache in use, sent per step over dcp")
    print("model context batch | tp x dcp |      ms  [10%-90%]  ratio | cache KiB  ratio | sent KiB")
    for kind in options.models:
        for context in options.context:
            for batch in options.batch:
                compare(kind, context, batch, options)


def compare(kind: str, context: int, batch: int, options: argparse.Namespace) -> None:
    """One line for each layout."""
    runners = [make_runner(kind, tp, dcp, context, batch, options) for tp, dcp in options.layouts]
    times = alternate([decode_step(runner, [context] * batch) for runner in runners], options.rounds)
    rows = [
        (statistics.median(taken), taken, cache_bytes(runner, context, batch), sent_bytes(runner, batch, options.merge))
        for runner, taken in zip(runners, times, strict=True)
    ]
    for (tp, dcp), (median, taken, cache, sent) in zip(options.layouts, rows, strict=True):
        low, *_, high = (1e3 * decile for decile in statistics.quantiles(taken, n=10))
        print(
            f"{kind:5} {context:7} {batch:5} | {tp:2} x {dcp:<3} | {median * 1e3:7.1f}  [{low:.1f}-{high:.1f}]  "
            f"{median / rows[0][0]:5.2f} | {cache / 1024:9,.0f}  {cache / rows[0][2]:5.2f} | {sent / 1024:8.1f}",
            flush=True,
        )


def make_runner(kind: str, tp: int, dcp: int, context: int, batch: int, options: argparse.Namespace) -> Runner:
    """A runner whose cache holds just `batch` requests of `context` tokens."""
    preset, shape = SHAPES[kind]
    made: dict[str, Any] = {
        "tensor_parallel_size": tp * dcp,
        "decode_context_parallel_size": dcp,
        "dtype": "float32",
        "load_format": "dummy",
        "max_num_seqs": batch,
        "block_size": options.block_size,
        "dcp_comm_backend": options.merge,
        "dcp_overlap": options.overlap,
        "hf_overrides": shape | {"num_hidden_layers": options.layers, "dtype": "float32"},
    }
    smallest = load_runner(open_model(preset), EngineConfig(**made, kv_cache_memory_bytes=2**24))
    blocks = batch * smallest.geometry.blocks(context)
    budget = blocks * block_bytes_per_device(smallest.model)
    return load_runner(open_model(preset), EngineConfig(**made, kv_cache_memory_bytes=budget))


def cache_bytes(runner: Runner, context: int, batch: int) -> int:
    return batch * runner.geometry.blocks(context) * block_bytes_per_device(runner.model)


def sent_bytes(runner: Runner, batch: int, merge: Merge) -> float:
    """Bytes sent for queries and merges in all layers, without what every layout sends over all devices."""
    return runner.model.config.num_layers * batch * exchange(runner.model.config, runner.model.layout, merge).bytes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", type=layout, nargs="+", default=[(8, 1), (2, 4), (1, 8)], metavar="TP,DCP")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--merge", choices=["ag_rs", "a2a", "psum"], default="ag_rs")
    parser.add_argument("--overlap", action="store_true", help="merge in two halves (dcp_overlap)")
    parser.add_argument("--rounds", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()

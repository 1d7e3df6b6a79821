"""Agents that share prefixes, on eight simulated B200: one workload for all published figures of Kimi-K2.6 with DCP.

Every request is a prefix that the agents of one group have in common, then the agent's own history, which grows with
each turn, 67 thousand tokens in the mean. A user is never idle. docs/performance.md derives the two sizes that are
chosen here. Times are floors.
"""

import argparse
from typing import NamedTuple

import numpy as np

from dcpjax.simulation.result import Simulation
from dcpjax.simulation.simulator import simulate
from dcpjax.simulation.trace import TraceRequest

B200 = {
    "tensor_parallel_size": 8,
    "hardware": "b200",
    "dtype": "nvfp4",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": 0.92,
    "workspace_bytes": 0,  # the published share leaves room for temporaries beside it
    "max_num_batched_tokens": 16_384,
    "max_mixed_prefill_tokens": 1 << 20,  # no pace for prompts, as in vLLM
}
UNIT = 256  # tokens


class Agents(NamedTuple):
    """Sizes in tokens."""

    groups: int = 64  # of agents with a prefix in common
    shared: int = 39_936
    own: int = 27_136  # in the mean over the turns
    new: int = 1792  # more in every turn, the last answer included
    turns: int = 5  # odd, so that the middle one has the mean length
    answer: int = 400

    def request(self, user: int, turn: int) -> TraceRequest:
        own = self.own + (turn - self.turns // 2) * self.new
        most = (self.own + self.turns * self.new) // UNIT
        first = (self.groups * self.shared) // UNIT + user * most
        group = user % self.groups * (self.shared // UNIT)
        return TraceRequest(
            timestamp=0,
            input_length=self.shared + own,
            output_length=self.answer,
            tokens_per_hash=UNIT,
            hash_ids=(*range(group, group + self.shared // UNIT), *range(first, first + own // UNIT)),
        )

    def requests(self, users: int) -> list[TraceRequest]:
        """Every user's first turn, then every user's second, and so on."""
        return [self.request(user, turn) for turn in range(self.turns) for user in range(users)]


def simulated(agents: Agents, dcp: int, users: int) -> Simulation:
    return simulate(
        agents.requests(users),
        "kimi-k2.6",
        **B200,
        decode_context_parallel_size=dcp,
        arrivals="closed",
        concurrency=users,
    )


class Warm(NamedTuple):
    """Means over the time from when every user had a first answer until the first user leaves; `most` is a maximum."""

    tokens_per_second: float
    usage: float  # share of the cache's blocks
    most: float
    running: float


def once_warm(run: Simulation, agents: Agents) -> Warm:
    generated = np.cumsum([step.decode_tokens for step in run.timeline])
    first_turns = run.max_num_seqs * (agents.answer - 1)
    inside = (generated > first_turns) & (generated <= first_turns * (agents.turns - 1))
    warm = [step for step, is_inside in zip(run.timeline, inside, strict=True) if is_inside]
    seconds = np.array([step.seconds for step in warm])
    used = np.array([step.used_blocks for step in warm]) / run.num_blocks
    return Warm(
        tokens_per_second=sum(step.decode_tokens for step in warm) / seconds.sum(),
        usage=float(np.average(used, weights=seconds)),
        most=float(used.max()),
        running=float(np.average([step.running for step in warm], weights=seconds)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=Agents().new, help="tokens that each turn adds")
    parser.add_argument("--groups", type=int, default=Agents().groups, help="prefixes that agents share")
    flags = parser.parse_args()
    agents = Agents(new=flags.new, groups=flags.groups)
    print("| dcp | users | tokens/s at most | cache in use, mean | most | running | found in cache |")
    print("|---|---|---|---|---|---|---|")
    for dcp, users in ((1, 16), (1, 32), (1, 64), (8, 64), (8, 256), (8, 512)):
        run = simulated(agents, dcp, users)
        warm = once_warm(run, agents)
        shares = f"{warm.usage:.0%} | {warm.most:.0%} | {warm.running:.0f} | {run.prefix_hit_rate:.0%}"
        print(f"| {dcp} | {users} | {warm.tokens_per_second:,.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()

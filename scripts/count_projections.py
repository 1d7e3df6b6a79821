"""Projections of keys and values under dcp: every rank computes all of them, or each a part, gathered afterwards?

Counts both for published models on eight devices at dcp 8, per step and in all layers: the time of the products (the
longer of bytes / bandwidth and operations / peak) and of the gather (a latency, and bytes / link speed). Weights and
gathered values are bfloat16. Nothing overlaps. The gather stands alone, or rides in the all-gather of the queries,
which decodes need anyway and which prompts with gathered keys do not have.
"""

from typing import NamedTuple

from dcpjax.checkpoint.presets import PRESETS
from dcpjax.models.config import ModelConfig, from_hf
from dcpjax.planning.hardware import HARDWARE, Hardware
from dcpjax.sharding.merge_cost import send

MODELS = ("llama-3.1-8b", "qwen3-235b-a22b", "kimi-k2")
MACHINES = ("b200", "h100")
STEPS = {"64 decodes": 64, "prompt of 2,048": 2048, "prompt of 8,192": 8192}
RANKS = 8
VALUE_BYTES = 2
HEAD = (
    "| model | device | step | weights read, MB | sent, MB | all on each rank, us | gathered alone, us | "
    "riding along, us |\n|---|---|---|---|---|---|---|---|"
)


class Projection(NamedTuple):
    """Of the keys and values of one layer."""

    layers: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Projection":
        outputs = config.mla.cached_dim if config.mla else 2 * config.num_kv_heads * config.head_dim
        return cls(config.num_layers, config.hidden_size, outputs)

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.inputs * self.outputs * VALUE_BYTES

    def product_seconds(self, tokens: int, share: float, hardware: Hardware) -> float:
        """Of a rank that computes this share of the outputs."""
        flops = 2 * tokens * self.layers * self.inputs * self.outputs
        return share * max(self.weight_bytes / hardware.bandwidth, flops / hardware.flops)

    def gathered_bytes(self, tokens: int) -> float:
        return self.layers * send("all_gather", tokens * self.outputs / RANKS, RANKS, VALUE_BYTES).bytes


class Ways(NamedTuple):
    """Seconds of a step."""

    replicated: float
    alone: float
    riding: float


def ways(projection: Projection, tokens: int, hardware: Hardware) -> Ways:
    split = projection.product_seconds(tokens, 1 / RANKS, hardware)
    riding = split + projection.gathered_bytes(tokens) / hardware.link
    return Ways(
        replicated=projection.product_seconds(tokens, 1, hardware),
        alone=riding + projection.layers * hardware.latency,
        riding=riding,
    )


def rows() -> list[str]:
    """Lines of a markdown table."""
    lines = []
    for model in MODELS:
        projection = Projection.of(from_hf(PRESETS[model]))
        for machine in MACHINES:
            for name, tokens in STEPS.items():
                found = ways(projection, tokens, HARDWARE[machine])
                read = f"{projection.weight_bytes / 1e6:,.0f} / {projection.weight_bytes / RANKS / 1e6:,.0f}"
                times = " | ".join(f"{seconds * 1e6:,.0f}" for seconds in found)
                sent = f"{projection.gathered_bytes(tokens) / 1e6:,.1f}"
                lines.append(f"| {model} | {machine} | {name} | {read} | {sent} | {times} |")
    return lines


if __name__ == "__main__":
    print("\n".join([HEAD, *rows()]))

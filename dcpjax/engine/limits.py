"""What one step of a model may hold on one platform."""

from typing import Literal

from dcpjax.engine.scheduler import PrefillBudget, StepLimits
from dcpjax.models import flops
from dcpjax.models.config import ModelConfig

# How long a multiply-add of attention takes, relative to one of a matrix product. Measured on CPU for a few tiles late
# in a prompt; accelerators run both on the same units.
ATTENTION_COST = {"cpu": 1.3}
# Prompt tokens beside decodes on CPU, before the head is counted: such a step takes about twice as long as a step of
# decodes alone. Decodes read the head as well, prompts do not need it.
MIXED_WORK = 36
# The same for what a step takes on CPU however small its model is, in multiply-adds: some 3 ms to launch its programs.
STEP_WORK = 100_000_000
# Tokens of a step of decodes and prompts on CPU: the smallest buckets, whose products cost little more than decodes'.
MIXED_STEPS = (32, 64)
# Prompt tokens that attend together in the smaller of these: fewer cost as much.
MIXED_TILE = 8
# Decode steps in one call on accelerators, for requests that are not streamed: launch and host then cost an eighth. On
# CPU one: eight save 5 to 13 % of SmolLM2-135M's steps, but the layers compile again for each combination of sampling
# options, which takes longer than short runs save.
DECODE_STEPS = 8


def step_limits(
    config: ModelConfig,
    platform: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_mixed_prefill_tokens: int | None,
    enable_prefix_caching: bool,
    num_decode_steps: int | Literal["auto"] = 1,
) -> StepLimits:
    """The user's choices, and the platform's defaults where the user made none."""
    on_cpu = platform == "cpu"
    per_token = flops.per_token(config)
    decode_work = round(MIXED_WORK * (1 + flops.per_choice(config) / per_token) + STEP_WORK / per_token)
    tokens = max_mixed_prefill_tokens or (decode_work if on_cpu else 512)
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or (1024 if on_cpu else 2048),
        prefill_budget=PrefillBudget(
            tokens=tokens,
            cost_per_position=ATTENTION_COST.get(platform, 1.0) * flops.per_position(config) / per_token,
            step_sizes=MIXED_STEPS if on_cpu and not max_mixed_prefill_tokens else (),
            always=max_mixed_prefill_tokens is not None,
            tile=min(MIXED_TILE, tokens),
        ),
        enable_prefix_caching=enable_prefix_caching,
        num_decode_steps=(1 if on_cpu else DECODE_STEPS) if num_decode_steps == "auto" else num_decode_steps,
        num_streamed_steps=1 if num_decode_steps == "auto" else num_decode_steps,
    )

"""What one step of a model may hold on one platform."""

from dcpjax.engine.scheduler import PrefillBudget, StepLimits
from dcpjax.models import flops
from dcpjax.models.config import ModelConfig

# How long a multiply-add of attention takes, relative to one of a matrix product. Measured on CPU, where a few tokens
# late in a long prompt mostly wait for memory; accelerators run both on the same units.
ATTENTION_COST = {"cpu": 3.0}
# Prompt tokens beside decodes on CPU, before the head is counted: such a step takes about twice as long as a step of
# decodes alone. Decodes read the head as well, prompts do not need it.
MIXED_WORK = 40
# Tokens of a step of decodes and prompts on CPU: the smallest bucket, whose products cost little more than decodes'.
MIXED_STEP = 32


def step_limits(
    config: ModelConfig,
    platform: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_mixed_prefill_tokens: int | None,
    enable_prefix_caching: bool,
) -> StepLimits:
    """The user's choices, and the platform's defaults where the user made none."""
    on_cpu = platform == "cpu"
    per_token = flops.per_token(config)
    decode_work = round(MIXED_WORK * (1 + flops.per_choice(config) / per_token))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or (1024 if on_cpu else 2048),
        prefill_budget=PrefillBudget(
            tokens=max_mixed_prefill_tokens or (decode_work if on_cpu else 512),
            cost_per_position=ATTENTION_COST.get(platform, 1.0) * flops.per_position(config) / per_token,
            max_step_tokens=MIXED_STEP if on_cpu and not max_mixed_prefill_tokens else None,
            always=max_mixed_prefill_tokens is not None,
        ),
        enable_prefix_caching=enable_prefix_caching,
    )

"""What one step of a model may hold on one kind of machine. Numbers only; knows no arrays and no requests."""

from dcpjax.engine.scheduler import PrefillBudget, StepLimits
from dcpjax.models import flops
from dcpjax.models.config import ModelConfig

# Time of one of attention's multiply-adds over that of a matrix product's: measured on CPU, where a few tokens late in
# a long prompt mostly wait for its cache; accelerators run both on the same units.
ATTENTION_COST = {"cpu": 3.0}
# Prompt work beside decodes on CPU, as a share of what as many tokens' products take: with the head, which every decode
# reads and prompts do not need, about as long again as a decode takes.
MIXED_WORK = 40
# Tokens of a step of decodes and prompts on CPU: the smallest bucket, whose products cost little more than a decode's.
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
    """The user's choice, and for what he left open what suits the platform."""
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

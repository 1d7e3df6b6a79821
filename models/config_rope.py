"""Rotary position embedding in a config.json: present entries (`rope_parameters`) and older ones (`rope_scaling`)."""

import math
from dataclasses import dataclass
from typing import Literal

from dcpjax.models.config_fields import check_neutral
from dcpjax.models.config_values import (
    MOST_POSITIONS,
    Json,
    entries,
    flag,
    integer,
    number,
    numbers,
    optional_number,
    shown,
)

Kind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies."""

    theta: float
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: frequencies of wavelengths above original/low are divided by `factor`
    high_freq_factor: float = 4.0  # llama3: wavelengths below original/high are kept
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()  # one divisor per frequency
    beta_fast: float = 32.0  # yarn: pairs with more rotations than this within the original length are kept
    beta_slow: float = 1.0  # yarn: frequencies of pairs with fewer rotations are divided by `factor`
    truncate: bool = True  # yarn: round the two bounds outwards to whole pairs
    angle_scale: float = 1.0  # yarn: cosine and sine are multiplied by this
    softmax_mscale: float = 1.0  # yarn with mscale_all_dim: the softmax scale is multiplied by its square


_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
READ: dict[Kind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _YARN,
    "factors": {"factors"},  # from GGUF files only
}
_EVERY = {"rope_theta", "rope_type", "type", "original_max_position_embeddings"}
# All else that is written there counts, whatever its name, except at these values.
NEUTRAL = {"factor": (1.0,), "partial_rotary_factor": (1.0,), "extrapolation_factor": (1.0,), "attn_factor": (1.0,)}


def read_rope(config: Json, dim: int, *, latent: bool) -> RopeConfig:
    """The rotary embedding of `dim` dimensions.

    Only with `latent` attention YaRN multiplies the softmax scale; elsewhere all of it is in cosine and sine.
    """
    forms = [form for key in ("rope_parameters", "rope_scaling") if (form := entries(config, key))]
    read = [_read(config, form, dim, latent) for form in forms or [{}]]
    if any(other != read[0] for other in read):
        raise ValueError(
            "config.json: rope_scaling must say the same as rope_parameters, but does not; change rope_parameters alone"
        )
    return read[0]


def _read(config: Json, scaling: Json, dim: int, latent: bool) -> RopeConfig:
    kind = _kind(scaling)
    for key in scaling:
        if key not in READ[kind] | _EVERY:
            check_neutral(scaling, key, NEUTRAL.get(key, ()))
    original = _original_length(config, scaling)
    shared = {"theta": _theta(config, scaling), "kind": kind, "original_max_position_embeddings": original}
    match kind:
        case "linear":
            return RopeConfig(**shared, factor=number(scaling, "factor"))
        case "llama3":
            return _llama3(shared, scaling)
        case "yarn":
            return _yarn(shared, config, scaling, latent)
        case "factors":
            return RopeConfig(**shared, factors=_factors(scaling, dim))
    return RopeConfig(**shared)


def _kind(scaling: Json) -> Kind:
    given = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    kind = given[0] if given else "default"
    if not isinstance(kind, str) or kind not in READ:
        raise ValueError(f"config.json: rope_type must be default, linear, llama3 or yarn, but is {shown(kind)}")
    if given[1:] not in ([], [kind]):
        raise ValueError(f"config.json: type must be rope_type={kind!r}, but is {shown(given[1])}")
    return kind


def _theta(config: Json, scaling: Json) -> float:
    given = [number(form, "rope_theta") for form in (scaling, config) if "rope_theta" in form]
    if any(theta != given[0] for theta in given):
        raise ValueError(
            f"config.json: rope_theta must be the same inside and outside of the rope's parameters, but is {given[0]} "
            f"and {given[1]}"
        )
    return given[0] if given else 10000.0


def _original_length(config: Json, scaling: Json) -> int:
    """An entry beside the rope's parameters comes before the one among them, as in transformers."""
    key, default = "original_max_position_embeddings", integer(config, "max_position_embeddings", most=MOST_POSITIONS)
    inside = integer(scaling, key, default, most=MOST_POSITIONS)
    return integer(config, key, inside, most=MOST_POSITIONS)


def _llama3(shared: Json, scaling: Json) -> RopeConfig:
    low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
    if high <= low:
        raise ValueError(f"config.json: high_freq_factor must be above low_freq_factor={low}, but is {high}")
    return RopeConfig(**shared, factor=number(scaling, "factor"), low_freq_factor=low, high_freq_factor=high)


def _factors(scaling: Json, dim: int) -> tuple[float, ...]:
    factors = numbers(scaling, "factors")
    if len(factors) != dim // 2:
        raise ValueError(f"rope factors must be {dim // 2}, one per pair of dimensions, but are {len(factors)}")
    return factors


def _yarn(shared: Json, config: Json, scaling: Json, latent: bool) -> RopeConfig:
    """YaRN with its two temperatures (Peng et al. 2023, section 3.4, with DeepSeek's mscale terms)."""
    if shared["theta"] <= 1:
        raise ValueError(f"config.json: rope_theta must be above 1 with yarn, but is {shared['theta']}")
    factor = optional_number(scaling, "factor")
    if factor is None:
        factor = integer(config, "max_position_embeddings") / shared["original_max_position_embeddings"]
    mscale = optional_number(scaling, "mscale", zero=True)
    all_dim = optional_number(scaling, "mscale_all_dim", zero=True)
    angle_scale = optional_number(scaling, "attention_factor")
    if angle_scale is None and mscale and all_dim:
        angle_scale = _mscale(factor, mscale) / _mscale(factor, all_dim)
    elif angle_scale is None:
        angle_scale = _mscale(factor, 1.0)
    return RopeConfig(
        **shared,
        factor=factor,
        beta_fast=optional_number(scaling, "beta_fast", zero=True) or 32.0,
        beta_slow=optional_number(scaling, "beta_slow", zero=True) or 1.0,
        truncate=flag(scaling, "truncate", True),
        angle_scale=angle_scale,
        softmax_mscale=_mscale(factor, all_dim) if latent and all_dim else 1.0,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

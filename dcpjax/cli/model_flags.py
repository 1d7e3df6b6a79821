"""The flags that choose a model and run it, and opening the model with them.

Options are checked before jax is imported.
"""

import time
import warnings
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import PromptWarning
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.cli.flags import Flags, Parser, add_options
from dcpjax.cli.statistics import describe_engine
from dcpjax.cli.verbosity import Verbosity, add_verbosity_flags

if TYPE_CHECKING:
    from dcpjax.llm import LLM

# sampling parameters whose default a model may set in its generation_config.json
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SEED_HELP = (
    "makes sampling repeatable, whatever other requests run; without it, samples depend on the order of the prompts. "
    "Also seeds the random weights of --load-format dummy"
)


def add_model_flags(parser: Parser, *, max_tokens: int) -> None:
    """`--model`, verbosity, and every field of `SamplingParams` and `EngineConfig`."""
    add_model_flag(parser)
    add_verbosity_flags(parser)
    add_options(
        parser,
        "sampling",
        SamplingParams,
        explain={"seed": SEED_HELP},
        defaults={**model_defaults(), "temperature": "the model's own, else 0"},
        values={"max_tokens": max_tokens},
    )
    add_engine_flags(parser)


def add_engine_flags(parser: Parser) -> None:
    add_options(parser, "running the model", EngineConfig, leave_out=["seed", "hf_overrides"])


def add_model_flag(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        help="a folder in Hugging Face form, a .gguf file, a hub id, or smollm2-135m for a first try; required",
    )


def model_defaults() -> dict[str, str]:
    """What `--help` says about the default of each parameter in `MODEL_DEFAULTS`."""
    return {name: f"the model's own, else {getattr(SamplingParams, name)}" for name in MODEL_DEFAULTS}


def required_model(flags: Flags) -> str:
    """The value of `--model`. Raises ValueError if it is not given."""
    if not flags.get("model"):
        raise ValueError(
            "--model must name a model, but is not given; use a folder, a .gguf file, a hub id, or "
            "smollm2-135m for a first try"
        )
    return flags.get("model")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """A model and its options, checked as far as possible before the model is opened."""

    model: str
    engine: dict[str, Any]  # options of `EngineConfig`
    sampling: dict[str, Any]  # options of `SamplingParams`
    verbosity: Verbosity

    @classmethod
    def from_flags(cls, flags: Flags, *, max_tokens: int) -> "ModelArguments":
        model = required_model(flags)
        engine, sampling = flags.options(EngineConfig), flags.options(SamplingParams)
        sampling = {"max_tokens": max_tokens, **sampling}
        if engine.get("seed", 0) is None:  # one flag sets both seeds, but only that of a request may be None
            del engine["seed"]
        EngineConfig.from_options(engine)
        SamplingParams.from_options(sampling)
        return cls(model=model, engine=engine, sampling=sampling, verbosity=Verbosity.from_flags(flags))

    def open(self) -> "LLM":
        from dcpjax.llm import LLM

        warnings.simplefilter("ignore", PromptWarning)  # commands print the errors of prompts themselves
        started = time.monotonic()
        llm = LLM(self.model, progress=not self.verbosity.quiet, **self.engine)
        self.verbosity.print_detail(
            f"{self.model} opened in {time.monotonic() - started:.1f} s: {describe_engine(llm)}"
        )
        return llm

    def sampling_params(self, llm: "LLM") -> SamplingParams:
        """The model's own sampling parameters, greedy if it sets no temperature, overridden by the flags."""
        params = llm.get_default_sampling_params()
        if llm.files.generation_config.get("temperature") is None:
            params = replace(params, temperature=0.0)
        params = replace(params, **self.sampling)
        self.verbosity.print_detail(f"sampling with {_changed_params(params)}")
        return params


def _changed_params(params: SamplingParams) -> str:
    """The parameters that differ from the defaults of `SamplingParams`."""
    usual = SamplingParams()
    names = [field.name for field in fields(SamplingParams)]
    changed = [name for name in names if getattr(params, name) != getattr(usual, name)]
    return ", ".join(f"{name}={getattr(params, name)!r}" for name in changed) or "the defaults of SamplingParams"

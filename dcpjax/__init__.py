"""Exact decode context parallelism for long-context language models in JAX.

Names are imported on first use: `import dcpjax` starts no backend and is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpjax.api.beam_search import BeamSearchParams
    from dcpjax.api.outputs import CompletionOutput, RequestOutput, StreamEvent
    from dcpjax.api.prompts import TextPrompt, TokensPrompt
    from dcpjax.api.sampling_params import SamplingParams
    from dcpjax.api.structured_outputs import StructuredOutputsParams
    from dcpjax.jobs.run import run_batch
    from dcpjax.llm import LLM, generate
    from dcpjax.planning.planner import plan
    from dcpjax.simulation.simulator import simulate

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "generate",
    "plan",
    "run_batch",
    "simulate",
]

_HOME = {
    "LLM": "dcpjax.llm",
    "generate": "dcpjax.llm",
    "BeamSearchParams": "dcpjax.api.beam_search",
    "CompletionOutput": "dcpjax.api.outputs",
    "RequestOutput": "dcpjax.api.outputs",
    "StreamEvent": "dcpjax.api.outputs",
    "SamplingParams": "dcpjax.api.sampling_params",
    "StructuredOutputsParams": "dcpjax.api.structured_outputs",
    "TextPrompt": "dcpjax.api.prompts",
    "TokensPrompt": "dcpjax.api.prompts",
    "plan": "dcpjax.planning.planner",
    "run_batch": "dcpjax.jobs.run",
    "simulate": "dcpjax.simulation.simulator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dcpjax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

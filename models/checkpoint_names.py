"""Names of arrays in a checkpoint: of a tensor, or of an array that is made of several tensors or of parts of one.

And names of the tensors that a checkpoint may hold although nothing reads them.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from dcpjax.models.config import ModelConfig


@dataclass(frozen=True)
class Stack:
    """Tensors of equal shape, stacked along a new first axis: the experts of a layer."""

    tensors: tuple[str, ...]


@dataclass(frozen=True)
class HeadRows:
    """Rows `start .. stop - 1` of each head of a tensor [heads * rows, columns], as [heads, stop - start, columns]."""

    tensor: str
    rows: int  # of one head
    start: int
    stop: int


Name = str | Stack | HeadRows

# Constants of the rotary embedding, which older versions of transformers and llama.cpp store.
_CONSTANT = re.compile(r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn_rot_embd(\.weight)?)")


def known_leftovers(names: Collection[str], config: ModelConfig) -> set[str]:
    """Those of a checkpoint's tensors that the model does not need: all others are read, or the config is wrong.

    - constants of the rotary embedding
    - what is not of the language model, in a multimodal checkpoint
    - a head that is the embedding
    - layers for multi-token prediction behind the last one (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    """
    skipped = _prediction_layers(names, config)
    return {
        name
        for name in names
        if _CONSTANT.fullmatch(name) or not name.startswith(config.prefix) or name.startswith(skipped)
    } | ({head_name(config)} & set(names) if config.tie_word_embeddings else set())


def embedding_name(config: ModelConfig) -> str:
    return f"{config.prefix}model.embed_tokens.weight"


def head_name(config: ModelConfig) -> str:
    return f"{config.prefix}lm_head.weight"


def _prediction_layers(names: Collection[str], config: ModelConfig) -> tuple[str, ...]:
    """What the names of layers for multi-token prediction begin with; such a layer has a projection of its own."""
    if config.mla is None:
        return ()
    layer = re.compile(rf"({re.escape(config.prefix)}model\.layers\.(\d{{1,9}})\.)eh_proj\.weight")
    found = [match for name in names if (match := layer.fullmatch(name))]
    return tuple(match[1] for match in found if int(match[2]) >= config.num_layers)

"""`dcpjax inspect`: what a model consists of, without loading its weights."""

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from dcpjax.api.outputs import counted
from dcpjax.cli.flags import Flags, Parser, integer

if TYPE_CHECKING:
    from dcpjax.planning.inspection import Inspection, Stored

DEVICES = (1, 2, 4, 8)


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=integer,
        metavar="N",
        help=f"also list the legal layouts for this number of devices (default: {', '.join(map(str, DEVICES))})",
    )


def run(flags: Flags) -> int:
    if len(flags.positionals) != 1:
        raise ValueError(
            "inspect must have one model, a folder, a .gguf file, a hub id or a preset such as kimi-k2, but has "
            + (", ".join(map(repr, flags.positionals)) or "none")
        )
    devices = flags.get("tensor_parallel_size", 1)
    if devices < 1:
        raise ValueError(f"--tensor-parallel-size must be an integer of at least 1, but is {devices}; use 1 or more")
    from dcpjax.planning.inspection import inspect_model

    found = inspect_model(flags.positionals[0], sorted({*DEVICES, devices}))
    print(json.dumps(to_dict(found), ensure_ascii=False) if flags.get("json") else to_text(found))
    return 0


def to_dict(found: "Inspection") -> dict[str, Any]:
    """The inspection as JSON values; a missing value is None."""
    config, stored, vocabulary = found.config, found.stored, found.vocabulary
    return {
        "model": found.model,
        "family": config.family,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention": _attention(found),
        "experts": _experts(found),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope": {"kind": config.rope.kind, "theta": config.rope.theta, "factor": config.rope.factor},
        "tie_word_embeddings": config.tie_word_embeddings,
        "parameters": found.parameters,
        "parameters_per_token": found.parameters_per_token,
        "dtypes": stored and {name: {"tensors": part.tensors, "bytes": part.bytes} for name, part in stored.items()},
        "quantisation": found.quantisation,
        "tokenizer": vocabulary and {"kind": vocabulary.kind, "size": vocabulary.size},
        "chat_template": bool(vocabulary and vocabulary.chat_template),
        "generation_config": dict(found.generation),
        "eos_token_ids": list(found.end_tokens),
        "kv_cache": {"dtype": found.kv_dtype, "bytes_per_token": found.kv_bytes_per_token},
        "layouts": [layout for devices in found.layouts for layout in _layouts(found, devices)],
    }


def to_text(found: "Inspection") -> str:
    rows = [*_sizes(found), *_files(found), *_layout_rows(found)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _sizes(found: "Inspection") -> Iterator[tuple[str, str]]:
    config, moe = found.config, found.config.moe
    yield "model", found.model
    yield "family", config.family
    yield "layers", f"{config.num_layers} of width {config.hidden_size:,}, feed-forward {config.intermediate_size:,}"
    yield "attention", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in _attention(found).items())
    if moe is not None:
        shared = f" and a shared one of width {moe.shared_size:,}" if moe.shared_size else ""
        yield (
            "experts",
            f"{moe.experts} of width {moe.intermediate_size:,}, {moe.experts_per_token} per token{shared}; "
            f"in {config.num_layers - len(moe.dense_layers)} of the layers",
        )
    rope = "" if config.rope.kind == "default" else f", rope {config.rope.kind} x {config.rope.factor:g}"
    yield "vocabulary", f"{config.vocab_size:,}, {'tied' if config.tie_word_embeddings else 'not tied'} to the head"
    yield "positions", f"{config.max_position_embeddings:,}{rope}"
    per_token = "" if moe is None else f", {found.parameters_per_token:,} per token"
    yield "parameters", f"{found.parameters:,}{per_token}"


def _files(found: "Inspection") -> Iterator[tuple[str, str]]:
    if found.stored is None:
        yield "weights", "no files"
    else:
        yield "weights", _amount(found.stored.values())
        yield from ((f"  {name}", _amount([part])) for name, part in found.stored.items())
    yield "quantisation", found.quantisation or "none"
    vocabulary = found.vocabulary
    yield "tokenizer", f"{vocabulary.kind}, {vocabulary.size:,} tokens" if vocabulary else "none"
    yield "chat template", "yes" if vocabulary and vocabulary.chat_template else "no"
    defaults = ", ".join(f"{name}={value}" for name, value in found.generation.items())
    yield "generation", f"{defaults or 'no sampling defaults'}; end tokens {list(found.end_tokens)}"
    yield "KV cache", f"{found.kv_bytes_per_token:,} bytes per token in {found.kv_dtype}, for one copy"


def _amount(parts: "Collection[Stored]") -> str:
    tensors, size = sum(part.tensors for part in parts), sum(part.bytes for part in parts)
    return f"{counted(tensors, 'tensor')}, " + (f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB")


def _layout_rows(found: "Inspection") -> Iterator[tuple[str, str]]:
    yield "layouts", "tp x dcp for each number of devices, and the copies of the cache that it stores"
    for devices in found.layouts:
        legal = [f"{one['tp']} x {one['dcp']} ({one['copies']}x)" for one in _layouts(found, devices)]
        yield (
            f"  {devices}",
            ", ".join(legal) or f"none: {devices} devices cannot share {found.config.num_heads} heads evenly",
        )


def _layouts(found: "Inspection", devices: int) -> list[dict[str, int]]:
    heads = found.config.cache_heads
    return [
        {"devices": devices, "tp": layout.tp, "dcp": layout.dcp, "copies": layout.duplication(heads)}
        for layout in found.layouts[devices]
    ]


def _attention(found: "Inspection") -> dict[str, int | None]:
    config, latent = found.config, found.config.mla
    if latent is None:
        return {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return {
        "heads": config.num_heads,
        "query_rank": latent.q_rank,
        "latent_rank": latent.latent_rank,
        "nope_dim": latent.nope_dim,
        "rope_dim": latent.rope_dim,
        "value_dim": latent.value_dim,
    }


def _experts(found: "Inspection") -> dict[str, int] | None:
    moe = found.config.moe
    if moe is None:
        return None
    return {
        "experts": moe.experts,
        "experts_per_token": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
        "shared_size": moe.shared_size,
        "layers": found.config.num_layers - len(moe.dense_layers),
    }

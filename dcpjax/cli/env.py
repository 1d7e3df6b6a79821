"""`dcpjax env`: what a bug report needs to know about this machine."""

import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dcpjax.checkpoint.hub import cache_folder
from dcpjax.cli.flags import Flags, Parser

REQUIRED = ("dcpjax", "jax", "jaxlib", "numpy", "transformers", "tokenizers", "safetensors")
OPTIONAL = ("gguf", "huggingface_hub", "torch")


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(flags: Flags) -> int:
    if flags.positionals:
        raise ValueError(f"env takes no arguments, but got {flags.positionals[0]!r}; remove it")
    found = environment()
    print(json.dumps(found, ensure_ascii=False) if flags.get("json") else _table(found))
    return 0


def environment() -> dict[str, Any]:
    """Plain data; None for what is not there. Starts JAX's backend, to see its devices."""
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in REQUIRED + OPTIONAL},
        "platform": platform.platform(),
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
        "devices": _devices(),
        "cpu_kernels": _cpu_kernels(),
        "cache": {"path": str(cache_folder()), "bytes": _size(cache_folder())},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    """Those this process may use, where the system tells."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _devices() -> dict[str, Any]:
    """Kind of device -> how many; or why JAX has none."""
    try:
        import jax

        devices = jax.devices()
    except (ImportError, RuntimeError) as error:
        return {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    return dict(Counter(_kind(device.platform, device.device_kind) for device in devices))


def _cpu_kernels() -> dict[str, Any]:
    """What the kernels for CPUs use here, or why they cannot be used."""
    try:
        from dcpjax.models.kernels.cpu import support
    except ImportError as error:  # without JAX
        return {"available": False, "reason": str(error)}
    return support.details()


def _kind(platform_name: str, device_kind: str) -> str:
    return platform_name if platform_name == device_kind.lower() else f"{platform_name} ({device_kind})"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _table(found: dict[str, Any]) -> str:
    memory, cache = found["memory_bytes"], found["cache"]
    devices = ", ".join(f"{count} {kind}" for kind, count in found["devices"].items() if kind != "error")
    rows = {name: version or "not installed" for name, version in found["versions"].items()} | {
        "platform": found["platform"],
        "cores": found["cores"],
        "memory": "unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
        "cpu kernels": _kernel_line(found["cpu_kernels"]),
        "devices": devices + (_CPU_NOTE if "cpu" in found["devices"] else ""),
        "cache": f"{cache['path']} ({cache['bytes'] / 1e6:.1f} MB)",
    }
    if "error" in found["devices"]:
        rows["devices"] = f"none: {found['devices']['error']}"
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())


def _kernel_line(found: dict[str, Any]) -> str:
    if not found["available"]:
        return f"not in use: {found['reason']}"
    threads = f"tbb {found['tbb']}" if found["tbb"] else "one thread: tbb is not installed (pip install 'dcpjax[cpu]')"
    return f"numba {found['numba']}, {threads}, FFI {found['ffi']}, {'AMX' if found['amx'] else 'no AMX'}"


_CPU_NOTE = "; --tensor-parallel-size makes as many virtual ones as it needs"

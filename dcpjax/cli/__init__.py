"""The command line: turns flags into options, runs a command, prints its result.

Knows flags, files, terminals and exit codes. Knows no arrays; jax is imported only once the flags are checked.
"""

from dcpjax.cli.commands import main

__all__ = ["main"]

"""`--quiet` and `--verbose`, and printing to standard error."""

import argparse
import sys
from dataclasses import dataclass

from dcpjax.cli.flags import Flags, Parser


def add_verbosity_flags(parser: Parser) -> None:
    switch = argparse.BooleanOptionalAction
    parser.add_argument(
        "-q", "--quiet", action=switch, help="print results and errors only: no progress, no statistics"
    )
    parser.add_argument(
        "-v", "--verbose", action=switch, help="also print what was opened, how long it took, and statistics"
    )


@dataclass(frozen=True, kw_only=True)
class Verbosity:
    """How much is printed on standard error besides errors."""

    quiet: bool = False
    verbose: bool = False

    @classmethod
    def from_flags(cls, flags: Flags) -> "Verbosity":
        quiet, verbose = flags.get("quiet", False), flags.get("verbose", False)
        if quiet and verbose:
            raise ValueError("--quiet must not come with --verbose, but does; remove one")
        return cls(quiet=quiet, verbose=verbose)

    @property
    def shows_statistics(self) -> bool:
        """Whether statistics are printed if neither --stats nor --no-stats is given."""
        return self.verbose or (sys.stderr.isatty() and not self.quiet)

    def print_detail(self, text: str) -> None:
        """Print only with --verbose."""
        if self.verbose:
            print_stderr(text)


def print_stderr(text: str) -> None:
    """Print what is not a result."""
    print(text, file=sys.stderr, flush=True)

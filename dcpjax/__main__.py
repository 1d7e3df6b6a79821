"""`python -m dcpjax`, the same as the `dcpjax` command."""

import sys

from dcpjax.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m shim``."""

import sys

from shim._tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

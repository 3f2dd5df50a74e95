"""What every run of tests keeps for the table at the end of `make test`."""

import os

from recording import pytest_configure  # noqa: F401 - a hook

os.environ.setdefault("COLUMNS", "1000")  # tests look for sentences; those of widths set their own

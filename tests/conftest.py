"""What every run of tests keeps for the table at the end of `make test`."""

from recording import pytest_configure  # noqa: F401 - a hook

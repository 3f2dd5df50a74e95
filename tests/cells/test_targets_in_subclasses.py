"""The tests of tests/support/subclass_cases.py, without Transformer Engine."""

from subclass_cases import *  # noqa: F403

CELLS = "every"

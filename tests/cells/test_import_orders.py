"""Every order of import, apply and revert on the real release, each in a process of its own."""

import os

import pytest

import shim
from shim.testing.import_orders import ORDERS, ImportOrders

# An order takes seconds here. Every day the one is run that the other tests of a cell, which apply to what is imported
# already, say least about; all of them with SHIM_TEST_ALL_ORDERS=1.
EVERY_DAY = ("apply import alias revert apply",)
CHOSEN = ORDERS if os.environ.get("SHIM_TEST_ALL_ORDERS") == "1" else EVERY_DAY


@pytest.mark.parametrize("order", CHOSEN)
@pytest.mark.parametrize("patch", [id for id, decision in shim.plan().decisions.items() if decision.wanted])
def test_import_order(patch, order):
    """Whatever the order: applied is what is read back, and reverted is the identical object."""
    targets = [t for t in shim.plan()[patch].targets if t not in shim.plan()[patch].optional]
    ImportOrders(targets, apply={"only": [patch], "require": [patch]}).run(order)

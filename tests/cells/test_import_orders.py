"""Every order of import, apply and revert on the real release, each in a process of its own."""

import os

import pytest

import shim
from shim.testing.import_orders import ORDERS, ImportOrders

WANTED = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
# An order takes seconds here. Every day the one is run that the other tests of a cell, which apply to what is imported
# already, say least about, with all patches at once; each of them in all orders with SHIM_TEST_ALL_ORDERS=1.
EVERY_DAY = [("apply import alias revert apply", WANTED)]
ALL = [(order, patches) for order in ORDERS for patches in ([id] for id in WANTED)]
CHOSEN = [*EVERY_DAY, *(ALL if os.environ.get("SHIM_TEST_ALL_ORDERS") == "1" else ())]


@pytest.mark.parametrize(
    ("order", "patches"), CHOSEN, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_import_order(order, patches):
    """Whatever the order: applied is what is read back, and reverted is the identical object."""
    plan = shim.plan()
    targets = dict.fromkeys(t for id in patches for t in plan[id].targets if t not in plan[id].optional)
    ImportOrders(list(targets), apply={"only": patches, "require": patches}).run(order)

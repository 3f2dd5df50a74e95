"""Every order of import, apply and revert on the real release, each in a process of its own."""

import functools
import os

import fork_server
import pytest
from chosen import ONCE
from contract_cases import can_be_imported
from import_orders import ORDERS, ImportOrders, run_together
from thorough import in_full

import shim
from shim import testing
from shim.testing import EVERYDAY

CELLS = {"0.12.0": "all", "0.19.2": "all"}

WANTED = [id for id, decision in shim.plan().decisions.items() if decision.wanted and can_be_imported(decision)]
# An order takes seconds here. Every day the one is run that the other tests of a cell, which apply to what is imported
# already, say least about, with all patches at once; each of them in all orders with SHIM_TEST_ALL_ORDERS=1.
EVERY_DAY = [("apply import alias revert apply", WANTED)]
ALL = [(order, patches) for order in ORDERS for patches in ([id] for id in WANTED)]
# In `make test` a process that has not loaded torch yet is started on the oldest release alone.
SHARES_LOADED = ONCE and testing.release() != EVERYDAY[0]
CHOSEN = [*EVERY_DAY, *(ALL if os.environ.get("SHIM_TEST_ALL_ORDERS") == "1" else ())]


@pytest.mark.parametrize(
    ("order", "patches"), CHOSEN, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_import_order(order, patches):
    """Whatever the order: applied is what is read back, and reverted is the identical object."""
    if len(patches) == 1 and order.startswith("import "):
        said = of_all_patches(order)[patches[0]]
        assert not said, said
    else:
        case_of(patches).run(order, share_loaded=SHARES_LOADED)


@functools.cache
def of_all_patches(order):
    return run_together(order, {id: case_of([id]) for id in WANTED})


def case_of(patches, setup=""):
    plan = shim.plan()
    # What a release lacks is no object before apply(), and nobody can have taken it. What is bound alone has other
    # aliases, which stay upstream's.
    left_out = {
        target for id in patches for target in (*plan[id].optional, *plan[id].may_be_missing, *plan[id].no_aliases)
    }
    targets = dict.fromkeys(t for id in patches for t in plan[id].targets if t not in left_out)
    return ImportOrders(list(targets), apply={"only": patches, "require": patches}, setup=setup)


@in_full
@pytest.mark.once
def test_processes_after_the_first_start_with_torch_and_without_what_is_patched():
    asks = "import sys; print(sorted({'torch', 'megatron', 'shim', 'transformer_engine', 'pytest'} & set(sys.modules)))"
    for _ in range(2):
        done = fork_server.run(f"{asks}\nimport megatron.core.models.gpt.gpt_model, shim; shim.apply()")
        assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "['torch']\n"


@in_full  # tests/engine/test_import_orders.py has the same of the fake world
@pytest.mark.once
@pytest.mark.parametrize(
    ("order", "broken", "told"),
    [
        (
            "import alias apply revert",
            "transactions as p; p.Draft._restore = lambda *a: None",
            "not the object it was before",
        ),
        ("import alias apply", "transactions as d; d.find_aliases = lambda *a: []", "an alias of .* is another object"),
        (
            "apply import alias",
            "import_hook as h; h.ImportHook.find_spec = lambda *a: None\n"
            "import shim._engine.engine as e; e.Engine.catch_up = lambda self: None",
            "is not reported as bound",
        ),
    ],
)
def test_an_order_still_fails_where_the_engine_is_broken(order, broken, told):
    with pytest.raises(AssertionError, match=told):
        case_of(["mtp-packed-sequences"], f"import shim._engine.{broken}").run(order, share_loaded=SHARES_LOADED)

"""The reusable test case of import orders, on the fake world, and proof that it can fail."""

import sys
from dataclasses import replace

import fork_server
import pytest
from import_orders import ORDERS, ImportOrders, run_together
from thorough import times

from shim.testing.patience import patience

CORE = "megatron.core."
ALLOWED = {"packages": "fake_patches"}
TARGETS = [
    CORE + t for t in ("ops:double", "ops:LIMIT", "layers:Layer.forward", "layers:Layer.make", "layers:Layer.tag")
]


@pytest.fixture
def case(world):
    world.patch("p", TARGETS[:-1])
    world.patch("q", [(TARGETS[-1], CORE + "layers:Base.tag"), CORE + "layers:Layer.size", TARGETS[0]])
    world.module("slow", "import time\n\nimport megatron.core.users\n\ntime.sleep(0.05)\n")
    imports = f"import {CORE}slow, {CORE}users, {CORE}layers"
    return ImportOrders([*TARGETS, CORE + "layers:Layer.size"], imports=imports, apply=ALLOWED)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports(case, order):
    """Whatever comes first, the import of a target, of an alias or apply(): bound while applied, upstream's after."""
    case.run(order)


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("broken", ["no_hook", "no_aliases", "no_restore"])
def test_the_case_sees_a_broken_engine(case, world, order, broken):
    """Without the import hook, the search for aliases or the restoring, orders fail."""
    setup = {
        "no_hook": "import shim._engine.import_hook as h\nh.ImportHook.find_spec = lambda *a: None\n"
        "import shim._engine.engine as e\ne.Engine.catch_up = lambda self: None",
        "no_aliases": "import shim._engine.transactions as b\nb.find_aliases = lambda *a: []",
        "no_restore": "import shim._engine.transactions as p\np.Draft._restore = lambda self, slot: None",
    }[broken]
    broken_case = ImportOrders(case.targets, imports=case.imports, setup=setup, apply=ALLOWED)
    fails = {"no_hook": ORDERS[:1], "no_aliases": ORDERS[2:3], "no_restore": ORDERS}[broken]
    if order in fails:
        with pytest.raises(AssertionError, match="import order"):
            broken_case.run(order)


def test_the_case_sees_a_broken_engine_in_a_process_that_shares_modules(case):
    """The second and the third process are forked from one that has what the first one loaded."""
    setup = "import sys; assert 'yaml' in sys.modules\n"
    setup += "import shim._engine.transactions as p; p.Draft._restore = lambda *a: None"
    for order in ORDERS[:2]:
        case.run(order)
    with pytest.raises(AssertionError, match="is still patched"):
        ImportOrders(case.targets, imports=case.imports, setup=setup, apply=ALLOWED).run(ORDERS[0])
    case.run(ORDERS[0])


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("imports", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
        ("import time; print('so far', flush=True); time.sleep(600)", "did not end within 10 s:\nso far"),
        ("raise SystemExit(0)", "left before its end"),
        ("import os; os._exit(0)", "left before its end"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise SystemExit('why')", "exit status 1:.*\nwhy"),
    ],
)
@pytest.mark.parametrize("can_fork", times([True], [True, False]))
def test_no_end_of_a_process_is_taken_for_success(case, monkeypatch, imports, told, can_fork):
    monkeypatch.setattr(fork_server, "CAN_FORK", can_fork and fork_server.CAN_FORK)
    with pytest.raises(AssertionError, match=f"(?s)import order 'apply import' .*{told}"):
        ImportOrders(
            case.targets, imports=imports, timeout=10 if "sleep" in imports else patience(), apply=ALLOWED
        ).run("apply import")


@pytest.mark.one_python
@pytest.mark.parametrize("order", [order for order in ORDERS if order.startswith("import ")][:: times(3, 1)])
def test_cases_that_share_an_import_fail_alone(case, order):
    """Each has a process of its own after the import: one that dies, or leaves early, is told and harms no other."""
    leaves = replace(
        case, imports=f"{case.imports}; import os, sys\n'left' in sys.modules and os._exit(0)\nsys.modules['left'] = os"
    )
    one, refused = replace(case, targets=TARGETS[:1]), replace(case, apply={**ALLOWED, "only": ["nobody"]})
    found = run_together(order, {"all": case, "one": one, "leaves": leaves, "refused": refused, "again": case})
    assert (found["all"], found["one"], found["again"]) == ("", "", "")
    assert f"import order {order!r} left before its end" in found["leaves"]
    assert "exit status 1" in found["refused"] and "names 'nobody', which is not a patch" in found["refused"]


@pytest.mark.one_python
def test_a_case_that_hangs_behind_a_shared_import_is_ended(case):
    waits = "import sys, time\n'seen' in sys.modules and time.sleep(60)\nsys.modules['seen'] = time"
    hangs = replace(case, imports=f"{case.imports}; {waits}", timeout=3)
    found = run_together("import apply alias", {"hangs": hangs, "all": case})
    assert found["all"] == "" and "exit status -14" in found["hangs"]  # SIGALRM


@pytest.mark.one_python
@pytest.mark.parametrize("ends", ["raise SystemExit(0)", "raise SystemExit(3)"])
def test_a_shared_import_that_fails_is_told(case, ends):
    with pytest.raises(AssertionError, match=r"left before its end|exit status 3"):
        run_together("import apply alias", {"all": replace(case, imports=ends)})


@pytest.mark.one_python
def test_without_fork_each_case_imports_for_itself(case, monkeypatch):
    monkeypatch.setattr(fork_server, "CAN_FORK", False)
    refused = replace(case, apply={**ALLOWED, "only": ["nobody"]})
    found = run_together("import apply alias", {"all": case, "refused": refused})
    assert found["all"] == "" and "names 'nobody', which is not a patch" in found["refused"]


def test_what_cannot_share_an_import_is_refused(case):
    with pytest.raises(ValueError, match="begins with something else"):
        run_together("apply import", {"all": case})


def test_an_order_runs_in_the_environment_of_this_moment(case, monkeypatch):
    """What is said to shim there holds, also when the server was started before."""
    case.run("apply import")
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    with pytest.raises(AssertionError, match="is not reported as bound"):
        case.run("apply import")
    monkeypatch.delenv("MEGATRON_SHIM_DISABLE")
    case.run("apply import")


def test_importing_the_case_imports_nothing_heavy():
    """import_orders needs neither torch nor pytest."""
    import subprocess

    code = "import sys; sys.path[:] = %r; import import_orders; print({'torch', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code % sys.path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""Import orders: one test case for every patch, each order in a separate process.

    from import_orders import ORDERS, ImportOrders

    CASE = ImportOrders(
        targets=["megatron.core.transformer.multi_token_prediction:process_mtp_loss"],
        apply={"only": ["mtp-packed-sequences"]},
    )

    @pytest.mark.parametrize("order", ORDERS)
    def test_import_order(order):
        CASE.run(order)

An order is a line of steps, such as "import alias apply revert apply", so that one order can be run by hand:

- import: runs `imports`; alias: a new module imports every target under another name and into a class;
- apply, revert: shim.apply(**apply) and shim.revert(); patched: enters shim.patched(**apply) and leaves it at once;
- import+apply: imports in a thread while this one applies; apply+import: the other way round.

After each step, existing targets and aliases are checked. While applied, each must be the patched object, read from the
dictionaries and reported as bound. Otherwise each must be upstream's own object, identical to the one seen before. At
the end everything is imported, applied and reverted. Then every function, class, method and property in the packages of
the targets must be the object from before the first apply, if it existed then.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fork_server

from shim.testing.patience import patience

__all__ = ["ORDERS", "ImportOrders", "run_together"]

ORDERS = (
    "apply import alias",
    "import apply alias",
    "import alias apply",
    "apply alias import",
    "apply apply import alias apply",
    "import alias apply apply",
    "apply revert import alias",
    "import revert alias apply",
    "import alias apply revert apply",
    "apply import alias revert apply",
    "import apply alias revert apply revert",
    "import patched alias patched apply",
    "patched apply import patched alias",
    "import+apply alias",
    "apply+import alias",
)

_ALIASES = "shim_import_order_aliases"
_CHILD = "import json, sys; case = json.load(sys.stdin); from import_orders import _Child; _Child(**case).run()"
_TOGETHER = (
    "import json, sys; given = json.load(sys.stdin); from import_orders import _in_children; _in_children(**given)"
)
_HELD = "the order held"  # a case that leaves before its end, with any exit status, does not print this


@dataclass(frozen=True)
class ImportOrders:
    """The case of one patch.

    targets: those of the patch in the installed release, as in the matrix: ``module:qualname``.
    apply: arguments of shim.apply, serialisable as JSON.
    imports: code that imports the targets; by default their modules.
    setup: code that runs first in each process, such as stubs for missing packages.
    timeout: seconds for one order; by default ten minutes, more on a machine with much else to do.
    """

    targets: Sequence[str]
    apply: Mapping[str, Any] = field(default_factory=dict)
    imports: str = ""
    setup: str = ""
    timeout: float = field(default_factory=patience)

    def run(self, order: str, *, share_loaded: bool = False) -> None:
        """Run one order in a new process with this one's sys.path and environment; AssertionError if it fails.

        Where processes can be forked, the first of them starts from nothing. Those after it share the installed modules
        that the first one had loaded, such as torch: not shim, no package of a target, nothing that `setup` made, and
        nothing that imports one of these. See `fork_server.run`, which also explains share_loaded.
        """
        done = _run(order, _CHILD, self._given(order), [self], self.timeout, share_loaded)
        _require(order, done.returncode, done.stdout, done.stderr)

    def _given(self, order: str) -> dict[str, Any]:
        return {
            "order": order,
            "targets": list(self.targets),
            "apply": dict(self.apply),
            "imports": self.imports,
            "setup": self.setup,
        }


def run_together(order: str, cases: Mapping[str, ImportOrders]) -> dict[str, str]:
    """Run an order that begins with import for many cases. Returns the failures, by name: "" if the order held.

    One process imports for all of them, and forks one for each case. An import takes most of a case's time.
    Each has the time that it is given. Where processes cannot be forked, each is run by itself.
    Raises ValueError if the order begins otherwise, or a case has a setup, and AssertionError if the process that
    imports fails.
    """
    if order.partition(" ")[0] != "import" or any(case.setup for case in cases.values()):
        raise ValueError(f"{order!r} begins with something else than import, or a case has a setup")
    if not fork_server.CAN_FORK:
        return {name: _told(case.run, order) for name, case in cases.items()}
    seconds = {name: case.timeout for name, case in cases.items()}
    given = {"cases": {name: case._given(order) for name, case in cases.items()}, "seconds": seconds}
    done = _run(order, _TOGETHER, given, list(cases.values()), max(seconds.values()) + sum(seconds.values()))
    _require(order, done.returncode, done.stdout, done.stderr)
    ended = json.loads(done.stdout.splitlines()[-1])
    return {name: _told(_require, order, status, stdout, "") for name, (status, stdout) in ended.items()}


def _told(function: Callable[..., None], *args: Any) -> str:
    """The text of the AssertionError that a call raises, or ""."""
    try:
        function(*args)
    except AssertionError as error:
        return str(error)
    return ""


def _run(
    order: str,
    code: str,
    given: Mapping[str, Any],
    cases: Sequence[ImportOrders],
    seconds: float,
    share_loaded: bool = False,
) -> subprocess.CompletedProcess[str]:
    packages = {target.partition(":")[0].partition(".")[0] for case in cases for target in case.targets}
    never = {*fork_server.PATCHED, *packages}
    try:
        return fork_server.run(code, stdin=json.dumps(given), timeout=seconds, never=never, share_loaded=share_loaded)
    except subprocess.TimeoutExpired as error:
        said = f"{_text(error.stdout)[-2000:]}{_text(error.stderr)[-6000:]}"
        message = f"import order {order!r} did not end within {seconds:g} s:\n{said}"
        raise AssertionError(message) from None


def _require(order: str, status: int, stdout: str, stderr: str) -> None:
    """Raise AssertionError if a process did not hold the order."""
    said = f"{stdout[-6000:]}{stderr[-6000:]}"
    if status:
        raise AssertionError(f"import order {order!r} failed with exit status {status}:\n{said}")
    if _HELD not in stdout.splitlines():
        raise AssertionError(f"import order {order!r} left before its end:\n{said}")


def _text(output: Any) -> str:
    """The output of a case so far; subprocess has bytes although text was asked for."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _in_children(cases: dict[str, dict[str, Any]], seconds: dict[str, float]) -> None:
    """Import for all cases, run each in a fork, and print {name: (exit status, output)} as JSON."""
    for case in cases.values():
        _Child(**case).do_import()
    found = {}
    for name, case in cases.items():
        with tempfile.TemporaryFile() as output:
            sys.stdout.flush()
            child = os.fork()
            if not child:
                status = 1
                signal.alarm(math.ceil(seconds[name]))  # ends the process, as an unhandled signal
                try:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                    _Child(**case).run()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            _, ended = os.waitpid(child, 0)
            output.seek(0)
            found[name] = os.waitstatus_to_exitcode(ended), output.read().decode(errors="replace")
    print(f"{_HELD}\n{json.dumps(found)}")


class _Child:
    """One order, inside its own process."""

    def __init__(self, order: str, targets: list[str], apply: dict[str, Any], imports: str, setup: str) -> None:
        import shim

        self.shim = shim
        self.order = order
        self.targets = targets
        self.arguments = apply
        modules = dict.fromkeys(target.partition(":")[0] for target in targets)
        self.imports = imports or "\n".join(f"import {module}" for module in modules)
        self.applied = False
        self.originals: dict[str, Any] = {}
        self.patched: dict[str, list[Any]] = {}  # target -> objects seen while applied
        self.before: dict[tuple[int, str], tuple[Any, Any]] = {}
        exec(compile(setup, "<setup>", "exec"), {})

    def run(self) -> None:
        steps: dict[str, Callable[[], None]] = {
            "import": self.do_import,
            "alias": self.do_alias,
            "apply": self.do_apply,
            "revert": self.do_revert,
            "patched": self.do_patched,
            "import+apply": lambda: self.together(self.do_import, self.do_apply),
            "apply+import": lambda: self.together(self.do_apply, self.do_import),
        }
        done = []
        for name in [*self.order.split(), "import", "alias", "apply", "revert"]:
            if not self.applied and self.is_imported() and not self.before:
                self.before = self.objects()
            done.append(name)
            steps[name]()
            try:
                self.check()
            except AssertionError as error:
                raise AssertionError(f"after {' '.join(done)!r}: {error}\n{self.shim.status()}") from error
        for (_, name), (owner, value) in self.before.items():
            assert vars(owner).get(name) is value, f"{owner}.{name} is not the object it was before"
        print(_HELD)

    # Steps

    def do_import(self) -> None:
        exec(compile(self.imports, "<imports>", "exec"), {})

    def do_alias(self) -> None:
        if _ALIASES in sys.modules:
            return
        module = types.ModuleType(_ALIASES)
        lines = []
        for number, target in enumerate(self.targets):
            name, _, qualname = target.partition(":")
            lines.append(f"from {name} import {qualname.partition('.')[0]} as taken_{number}")
            if "." not in qualname:
                lines.append(f"class Holder_{number}:\n    held = taken_{number}")
        exec(compile("\n".join(lines), _ALIASES, "exec"), module.__dict__)
        sys.modules[_ALIASES] = module

    def do_apply(self) -> None:
        self.shim.apply(**self.arguments)
        self.applied = True

    def do_revert(self) -> None:
        self.shim.revert()
        self.applied = False

    def do_patched(self) -> None:
        was, self.applied = self.applied, True
        with self.shim.patched(**self.arguments):
            self.check()
        self.applied = was

    def together(self, elsewhere: Callable[[], None], here: Callable[[], None]) -> None:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                elsewhere()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        here()
        thread.join()
        if raised:
            raise raised[0]

    # Checks

    def is_imported(self) -> bool:
        return all(target.partition(":")[0] in sys.modules for target in self.targets)

    def find(self, target: str) -> Any:
        """The current object of a target, read from the dictionaries without the engine."""
        module, _, qualname = target.partition(":")
        owner: Any = sys.modules[module]
        *path, name = qualname.split(".")
        for part in path:
            owner = vars(owner)[part]
        return next(vars(c)[name] for c in getattr(owner, "__mro__", (owner,)) if name in vars(c))

    def objects(self) -> dict[tuple[int, str], tuple[Any, Any]]:
        """(owner, name) -> object, for all modules and classes in the packages of the targets."""
        kinds = (types.FunctionType, type, staticmethod, classmethod, property)
        packages = {target.partition(".")[0] for target in self.targets}
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in packages and issubclass(type(module), types.ModuleType):
                owners = [module, *(v for v in vars(module).values() if issubclass(type(v), type))]
                for owner in owners:
                    if owner is module or owner.__module__.partition(".")[0] in packages:
                        for key, value in vars(owner).items():
                            if issubclass(type(value), kinds):
                                found[id(owner), key] = (owner, value)
        return found

    def check(self) -> None:
        if not self.is_imported():
            return
        status = self.shim.status()
        mine = [patch for patch in status.patches.values() if set(patch.targets) & set(self.targets)]
        for target in self.targets:
            value = self.find(target)
            bound = any(patch.targets.get(target) == "bound" for patch in mine)
            assert bound == self.applied, f"{target} is {'' if bound else 'not '}reported as bound"
            if self.applied:
                assert value is not self.originals.get(target), f"{target} is upstream's own"
                self.patched.setdefault(target, []).append(value)
            else:
                assert value is self.originals.setdefault(target, value), f"{target} is not the object it was before"
                assert all(value is not seen for seen in self.patched.get(target, ())), f"{target} is still patched"
            self.check_aliases(target, value)
        for patch in mine:
            states = ("applied", "inactive") if self.applied else ("excluded",)
            assert patch.state in states, f"{patch.id} is {patch.state}"

    def check_aliases(self, target: str, value: Any) -> None:
        module = sys.modules.get(_ALIASES)
        # Only functions and classes are known by identity.
        if module is None or "." in target.partition(":")[2] or not callable(value):
            return
        number = self.targets.index(target)
        assert vars(module)[f"taken_{number}"] is value, f"an alias of {target} is another object"
        assert vars(vars(module)[f"Holder_{number}"])["held"] is value, f"an alias of {target} in a class differs"

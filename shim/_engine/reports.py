"""What the engine reports: the state of every patch, read back from the process, and on the models of check()."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shim._engine.foreign import others_relied_on
from shim._engine.import_hook import another_copy
from shim._engine.report import Report
from shim._engine.states import Claim, States, not_applied, read_report

if TYPE_CHECKING:
    from shim._engine.engine import Engine
    from shim._planning.plan import Plan

__all__ = ["check", "effects", "report"]


def report(engine: Engine, otherwise: Callable[[], Plan]) -> Report:
    """The state of every patch now, also on the models of the last `check` that still live. See catch_up().

    otherwise: makes a plan to report on if there has been none.
    """
    last = engine.last if engine.last is not None and not another_copy(engine.last) else None
    return _on_models(engine, engine.checked.living(), engine.plan or not_applied(last or otherwise()), raising=False)


def check(engine: Engine, models: list[Any] | None, plan: Plan) -> Report:
    """The report for these models (None: those of the last check). Raises errors of the patches' own checks.

    Call catch_up() before: `_api` compares the ranks between the two.

    plan: the plan in force, used if another thread reverts it meanwhile.
    """
    models = engine.checked.living() if models is None else models
    engine.checked.remember(models)
    return _on_models(engine, models, engine.plan or plan, raising=True)


def effects(engine: Engine, plan: Plan) -> dict[str, str]:
    """Patch id -> what foreign objects, or a failure, leave of the patch (see ranks.EFFECTS)."""
    patches = _read_back(engine, plan, {}).patches
    states = {id: patch.state for id, patch in patches.items() if patch.state in ("conflict", "failed")}
    return {id: "in part" for id, patch in patches.items() if patch.is_partial} | states


def _on_models(engine: Engine, models: list[Any], plan: Plan, *, raising: bool) -> Report:
    states = States(_read_back(engine, plan, _resources(engine)), plan, engine.binder)
    for id, sentence in others_relied_on(plan, engine.binder):  # without the lock: it may read files
        states.add(Claim(id, "", sentence))
    found = states.report()
    if not models and not engine.binder.found.open and not engine.binder.found.around:
        return found
    from shim._engine.models import with_findings  # here, because apply() needs none of it

    return with_findings(found, models, plan, engine.binder, engine.checked, raising=raising)


def _read_back(engine: Engine, plan: Plan, resources: Mapping[str, tuple[str, ...]]) -> Report:
    with engine.lock:
        return read_report(plan, engine.binder, {} if engine.plan is None else engine.failed, resources)


def _resources(engine: Engine) -> dict[str, tuple[str, ...]]:
    """Patch id -> what the patch holds in the process now, in words. Called without the lock."""
    found: dict[str, tuple[str, ...]] = {}
    for id, text in engine.factories.resources():
        found[id] = (*found.get(id, ()), text)
    return found

"""The public functions: plan, apply, patched, revert, status, check, explain."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shim import _engine
from shim._detect import detect
from shim._errors import NotMetError, OptionError
from shim._explain import explanation
from shim._matrix import load_matrix
from shim._options import Options, matrix_argument, resolve
from shim._plan import Plan, make_plan
from shim._ranks import NOTHING, is_rank_zero, ranks_that_differ
from shim._report import PatchReport, Report
from shim._resume import differs, state_of
from shim._sources import Sources
from shim._verify import problems_in, read_report, shadows_in

__all__ = [
    "apply",
    "check",
    "check_resume",
    "checkpoint_state",
    "explain",
    "patched",
    "plan",
    "revert",
    "status",
]

log = logging.getLogger("shim")


def _make_plan(arguments: Mapping[str, Any]) -> Plan:
    arguments = dict(arguments)
    matrix = load_matrix(matrix_argument(arguments.pop("matrix", None)))
    sources = _engine.STATE.sources = Sources(before=_engine.STATE.sources)
    return make_plan(detect(sources), matrix, resolve(matrix, **arguments))


def plan(
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    require: Iterable[str] | str = (),
    kinds: Iterable[str] | str | None = None,
    strict: bool = False,
    on_drift: str = "skip",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    matrix: str | os.PathLike[str] | None = None,
    lock: str | os.PathLike[str] | None = None,
) -> Plan:
    """Return what `apply` with the same arguments would do, one decision and one reason per patch.

    Imports neither torch nor megatron and changes nothing. Raises OptionError for arguments that are not usable,
    and MatrixError for a matrix that is not valid.
    """
    made = _make_plan(locals())
    with _engine.STATE.lock:
        return _engine.with_conflicts(_engine.STATE, made)


def apply(
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    require: Iterable[str] | str = (),
    kinds: Iterable[str] | str | None = None,
    strict: bool = False,
    on_drift: str = "skip",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    matrix: str | os.PathLike[str] | None = None,
    lock: str | os.PathLike[str] | None = None,
) -> Report:
    """Apply every patch the installed releases need: now where the target is imported, else when it is.

    only, exclude: patch ids to take, or to leave out.    kinds: of correctness, compat, performance, feature.
    require: ids that must be applicable (or upstream already); NotMetError otherwise, and nothing is applied.
    strict: NotMetError where any correctness patch has drifted or is in conflict.
    on_drift: "skip" leaves a patch out whose targets are not known, "error" raises, "apply" applies it where the
        signature still fits.
    options: {patch id: {option: value}}.    matrix: another version_matrix.yaml.    lock: a lock file.

    Idempotent and thread-safe; a second call with other arguments adjusts to them. Raises BindError where a patch
    fails; it is then rolled back as a whole.
    """
    _engine.adopt(_make_plan(locals()))
    return status()


def revert() -> Report:
    """Take everything back: every name shim wrote holds the very object it held before.

    What somebody else has replaced meanwhile is left alone and reported, and no later apply() or import takes it
    back. Out of reach are bound methods, partials and closures taken while shim was applied, and pickles.
    """
    _engine.adopt(None)
    return status()


@contextlib.contextmanager
def patched(**arguments: Any) -> Iterator[Report]:
    """Apply within a with-statement; takes the arguments of `apply`, nests, and restores what was there before."""
    wanted = _make_plan(arguments)
    before = _engine.STATE.plan
    _engine.adopt(wanted)
    try:
        yield status()
    finally:
        _engine.adopt(before)


def _not_applied(made: Plan) -> Plan:
    reason = "shim.apply() has not been called in this process, or was reverted"
    excluded = {
        id: replace(decision, action="excluded", reason=reason)
        for id, decision in made.decisions.items()
        if decision.wanted
    }
    return replace(made, decisions={**made.decisions, **excluded})


def status() -> Report:
    """Return the state of every patch, read from the process at this moment."""
    _engine.catch_up(_engine.STATE)
    with _engine.STATE.lock:
        current = _engine.STATE.plan
        if current is not None:
            return read_report(current, _engine.STATE.binder, _engine.STATE.failed)
    made = _not_applied(_engine.STATE.last or _make_plan({}))
    with _engine.STATE.lock:
        return read_report(made, _engine.STATE.binder, {})


def check(model: Any = None, group: Any = None) -> Report:
    """Verify that everything wanted is active, on `model` itself, and on every rank of `group`.

    model: a torch module, or an iterable of them (virtual pipeline chunks). A subclass or an instance that overrides
    a patched method makes the patch ``shadowed``; where something else keeps it from its effect on this model, as a
    variable that had to be set earlier, it is ``inactive``. group: a torch.distributed process group, or None for the
    default one where torch.distributed is initialised; it gathers one short digest per rank.

    Pending, inactive, shadowed and conflicting patches are warnings; NotMetError where the patch is required, or
    with strict, and where ranks differ. Logs one INFO line on rank 0.
    """
    _engine.catch_up(_engine.STATE)
    current = _engine.STATE.plan
    # Before anything raises: a rank that does not take part would leave the others waiting.
    differing = ranks_that_differ(*_identity(current), group)
    current = _in_force("check")
    with _engine.STATE.lock:
        report = read_report(current, _engine.STATE.binder, _engine.STATE.failed)
        shadows = list(shadows_in(model, current, _engine.STATE.binder)) if model is not None else []
    patches = dict(report.patches)
    for id, what, remedy in problems_in(model, current) if model is not None else ():
        if patches[id].state == "applied":
            patches[id] = replace(patches[id], state="inactive", reason=what, remedy=remedy)
    for id, target, what in shadows:
        if patches[id].state in ("applied", "pending"):
            patches[id] = replace(
                patches[id],
                state="shadowed",
                reason=f"{target}: {what}",
                targets={**patches[id].targets, target: "shadowed"},
                remedy="call the method of the base class in the override, or drop the override",
            )
    report = replace(report, patches=patches)
    _judge(report, current.options)
    if differing:
        raise NotMetError(
            f"ranks disagree about what is applied (id, variant, bodies): {differing}. Remedy: install the same "
            "releases everywhere, and call shim.apply() with the same arguments on every rank."
        )
    if is_rank_zero():
        log.info("%s", report.summary)
    return report


def _identity(current: Plan | None) -> tuple[str, dict[str, str]]:
    """What ranks compare: the digest, and for every patch what of it goes into the digest, and its options."""
    if current is None:
        return NOTHING, {}
    return current.digest, {
        id: repr((d.variant, sorted(d.fingerprints.items()), sorted(d.options.items()))) if d.wanted else ""
        for id, d in current.decisions.items()
    }


def _judge(report: Report, options: Options) -> None:
    for patch in report.patches.values():
        if not _amiss(patch, patch.id in options.require):
            continue
        text = f"{patch.id} is {patch.state}: {patch.reason}." + (f" Remedy: {patch.remedy}." if patch.remedy else "")
        if patch.id in options.require or (options.strict and patch.kind == "correctness"):
            raise NotMetError(f"shim.check: required, but {text}")
        log.warning("%s", text)


def _amiss(patch: PatchReport, required: bool) -> bool:
    if patch.state == "inactive":
        return required or patch.kind != "feature"  # which nobody may have wanted
    return patch.state in ("pending", "shadowed", "conflict", "failed") or (
        patch.state == "drifted" and patch.kind == "correctness"
    )


def checkpoint_state() -> dict[str, Any]:
    """Return what a training checkpoint should keep about the patches in force: plain data, less than a few kB.

    Raises OptionError where nothing was applied in this process.
    """
    return state_of(_in_force("checkpoint_state"))


def check_resume(saved: Mapping[str, Any] | str | None) -> bool:
    """Say whether what a checkpoint was trained with is in force again; a WARNING names every difference.

    saved: what `checkpoint_state` gave, or a ``report.digest``; None where the checkpoint has neither, which is a
    difference. Raises OptionError where nothing was applied.
    """
    found = differs(saved, _in_force("check_resume"))
    if found:
        log.warning(
            "the checkpoint was trained with other patches than are in force now: %s. Remedy: install what it was "
            "trained with, or go on if the change is meant.",
            found,
        )
    return not found


def _in_force(caller: str) -> Plan:
    current = _engine.STATE.plan
    if current is None:
        raise OptionError(f"nothing was applied in this process; call shim.apply() before shim.{caller}()")
    return current


def explain(id: str) -> str:
    """Return in words what a patch is for, how it is wired, and what was decided about it here, and why."""
    made = _engine.STATE.plan or _make_plan({})
    if id not in made.decisions:
        raise OptionError(f"there is no patch {id!r}; known are {', '.join(made.decisions)}")
    return explanation(made, id)

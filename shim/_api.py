"""The public functions: plan, apply, patched, revert, status, check, explain, checkpoint_state, check_resume."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from shim._engine import engine as _engine
from shim._engine.log import announce, is_below_run, is_first_of_job, is_rank_zero, logger, say
from shim._engine.report import PatchReport, Report
from shim._errors import NotMetError, OptionError, ShimError
from shim._matrix.load import check_modules
from shim._matrix.model import Matrix
from shim._planning.evidence import Proved, files_of, trial_of
from shim._planning.options import (  # noqa: F401 - for get_type_hints()
    Arguments,
    Given,
    Ids,
    Options,
    PatchOptions,
    asked_matrix,
    is_disabled,
    resolve,
    takes_arguments,
    unknown_variables,
)
from shim._planning.plan import Plan, make_plan
from shim._printing.printable import did_you_mean
from shim._releases.detect import detect
from shim._releases.known_files import known_with

if TYPE_CHECKING:
    from typing_extensions import Unpack

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


NAMED = 8  # words of `concerns` in a message; a file may give forty
_OWN = (os.path.dirname(os.path.abspath(__file__)) + os.sep, contextlib.__file__)
_RUN = os.path.join("_workers", "run", "sitecustomize.py")


def _asked_by(what: str) -> str:
    """The call of shim.apply() or shim.patched() that this thread is in, with the file and line it is made from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        if frame.f_code.co_filename.endswith(_RUN):
            return "shim run"  # of which no line of the program is the caller
        frame = frame.f_back
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return f"shim.{what}(){where}"


def _make_plan(asked: Arguments, what: str = "plan", trial: Mapping[str, Proved] | None = None) -> Plan:
    """The plan for arguments. Warns of unknown variables, and of another matrix than the shipped one.

    what: the function that asks for it.    trial: see `apply_on_trial`.
    """
    matrix = asked_matrix(asked)
    if not is_disabled():
        check_modules(matrix, asked.package_names)
    _engine.ENGINE.warn([*unknown_variables(), *_of_another_matrix(matrix)])
    return replace(_planned(matrix, asked, trial), asked_by=_asked_by(what))


class _LostFeatures:
    """shim._te.features, imported when lost features are asked for. A plan alone does not need it."""

    def __getattr__(self, name: str) -> Any:
        from shim._te import features

        return getattr(features, name)


def _planned(matrix: Matrix, asked: Arguments, trial: Mapping[str, Proved] | None = None) -> Plan:
    options = resolve(matrix, asked)
    if trial is not None:
        options = replace(options, trial=trial)
    lock = options.lock
    if lock is not None:
        from shim._planning.lock import read_lock, words_of_lock  # here, because most jobs have none

        content = read_lock(lock)
        options = replace(options, lock_content=content)
        if options.concerns is None:
            options = replace(options, concerns=words_of_lock(lock, content))
    sources = _engine.ENGINE.new_sources(known_with(files_of(options.lock_content)))
    return make_plan(detect(sources), matrix, options, losses=_LostFeatures())


def _of_another_matrix(matrix: Matrix) -> list[str]:
    if matrix.shipped:
        return []
    return [f"patches are chosen by {matrix.path} (content {matrix.content}), not by the matrix that ships with shim"]


def default_plan() -> Plan:
    """The plan without arguments, for reports. Modules outside shim.patches are not refused, since none is imported."""
    asked = Arguments()
    return _planned(asked_matrix(asked), asked)


@takes_arguments
def plan(**given: Unpack[Given]) -> Plan:
    """Return what `apply` with the same arguments would do, one decision and one reason per patch.

    Imports neither torch nor megatron, and changes nothing. Raises OptionError for arguments that are not usable,
    and MatrixError for a matrix that is not valid.
    """
    return _engine.ENGINE.find_conflicts(_make_plan(Arguments(**given)))


@takes_arguments
def apply(**given: Unpack[Given]) -> Report:
    """Apply every patch that the installed releases need. Bind now what is imported, and the rest when it is.

    only, exclude: patch ids to apply, or to leave out.
    kinds: the kinds to apply, of correctness, compat, performance and feature.
    require: patch ids. NotMetError, with nothing applied, if one of them is not applied, and
        the release was not seen to be right without it (upstream, not-needed).
    rounding: whether patches may change rounding where stock is right, to save memory or time. One that is named in
        `require` may in any case.
    concerns: what the run has, as words of `shim plan --for` ("mtp,packed,lora"), or the path of the trainer's own
        arguments (as `shim plan --config`), or both. Patches that concern none of it are left out, unless `require`
        names them. What a file does not say counts as held. `check` warns of each patch that a model needs beyond that.
    strict: NotMetError if a correctness patch has drifted or is in conflict.
    on_drift: "skip" leaves a drifted patch out, "error" raises, "apply" applies it if the signature still fits.
    options: {patch id: {option: value}}, each of the type and in the range that `shim explain ID` shows.
    matrix: another version_matrix.yaml. None: the one that ships with shim.
    lock: a lock file, or None.
    packages: packages besides shim.patches in which the patch modules of such a matrix may lie.

    A list may be one text with commas between the names. An argument that is not given is taken from
    MEGATRON_SHIM_ONLY, _REQUIRE, _KINDS, _STRICT, _ROUNDING, _CONCERNS, _ON_DRIFT, _OPTIONS (JSON), _MATRIX or _LOCK.
    An argument that is given outranks its variable, even with its default value. MEGATRON_SHIM_DISABLE and _EXCLUDE
    outrank all arguments.

    Idempotent and thread-safe. A second call with other arguments adjusts to them: the last call counts for the whole
    process, from any caller. One WARNING names what it takes from the call before, with the file and line of both:
    patches that come or go, options that change, and demands (require, strict, on_drift, lock) that are dropped.
    Raises OptionError for arguments that are not usable, MatrixError for a matrix that is not valid, and BindError
    if a patch fails. The failed patch is rolled back as a whole.
    The demands hold for what is imported later as well: an import of another copy that does not meet them raises
    NotMetError.
    Logs one INFO line in the first process of a job, with how to do without shim.
    """
    wanted = _make_plan(Arguments(**given), "apply")
    _engine.ENGINE.switch_to(wanted)
    if not _engine.ENGINE.announced:
        first = is_first_of_job()
        _engine.ENGINE.announced = announce(wanted)
        if first and is_below_run():
            atexit.unregister(_say_how_it_ends)
            atexit.register(_say_how_it_ends, os.getpid())
    return _report()


def _say_how_it_ends(process: int) -> None:
    """At the end of the first process of a job below `shim run`: what is applied, and what of it concerns the run."""
    current = _engine.ENGINE.plan
    if os.getpid() != process or current is None or current.options.disabled:
        return  # a forked process, or the program has reverted
    try:
        report = status()
        states = report.counted
        about = report.concern or _asked_for(current.options.concerns)
    except ShimError as error:
        states, about = str(error), ""
    say(lambda: "; ".join(filter(None, [f"shim at the end: {states}", about])), True)


def _asked_for(words: Sequence[str] | None) -> str:
    if words is not None:
        return f"all concern a run with {_shortened(words)}, or may"
    return "which of them concern this run is not known: name what it trains (shim run --concerns mtp,packed,lora)"


def apply_on_trial(variants: Mapping[str, str], left: Mapping[str, Sequence[str]], **given: Any) -> Report:
    """`apply`, but with these variants by patch, whatever the bodies are; "" leaves a patch out.

    left: for each patch the targets to do without.
    Not public: for the processes in which `shim pin --prove` runs proofs.
    """
    _engine.ENGINE.switch_to(_make_plan(Arguments(**given), "apply", trial_of(variants, left)))
    return _report()


def revert() -> Report:
    """Take everything back: every name that shim wrote holds the very object that it held before.

    shim leaves alone what other code has replaced meanwhile, and reports it. No later apply() or import takes it
    back. A function of shim's that other code holds stays patched. Pickles are out of reach.
    """
    _engine.ENGINE.switch_to(None)
    return _report()


@contextlib.contextmanager
@takes_arguments
def patched(**given: Unpack[Given]) -> Iterator[Report]:
    """Apply within a with-statement, and restore at its end what was in force before. Arguments as for `apply`.

    Blocks nest. Patches concern the whole process. So blocks that run at once, in several threads or asyncio tasks,
    must have the same arguments, and the last of them to end restores. Raises OptionError for blocks with other
    arguments, and for apply() or revert() from outside the block.
    """
    wanted, block = _make_plan(Arguments(**given), "patched"), _engine.Block()
    try:
        _engine.ENGINE.switch_to(wanted, block)
        yield _report()
    finally:
        _engine.ENGINE.release(block)


def status() -> Report:
    """Return the state of every patch, read from the process at this moment.

    While the model lives that `check` looked at last, status() looks at it again, so that both say the same. A patch
    that an override in this model shadows, or that has no effect on it, is not ``applied``.
    If a package is loaded from another place than the plan is for, it is made anew. Raises NotMetError if that does not
    meet the demands of the call of apply() that it is for.
    """
    _engine.ENGINE.catch_up()
    return _report()


def _report() -> Report:
    return _engine.ENGINE.report(default_plan)


def check(model: Any = None, group: Any = None) -> Report:
    """Verify that every wanted patch has its effect on `model`, and that the ranks of `group` agree.

    model: a torch module, or an iterable of them (virtual pipeline chunks). None: the model that was checked last.
        An override of a patched method counts by its effect. One that calls the patched method keeps the patch
        ``applied``. Any other is tried on a tiny input, in milliseconds and without a trace: one that keeps what the
        patch does is fine, and one that hides it makes the patch ``shadowed``. If trying cannot tell, the patch is
        ``unknown``. `compatible` marks an override that is right. A harmless effect of an override stands in
        ``report[id].others``.
        A patch is ``inactive`` if something else keeps it from its effect on this model, such as a variable that
        had to be set earlier.
        Call it once the model is as it will be trained: adapters added, weights frozen.
        `status` says the same from then on: it looks at the model anew each time. shim holds the model weakly, and
        revert() forgets it.
    group: a torch.distributed process group. None: the default group, if torch.distributed is initialised. Each
        rank contributes one short digest, and all that it has applied if the digests differ. On NCCL call it after the
        trainer has chosen its device.

    Pending, unknown, inactive, shadowed, conflicting and failed patches, and drifted correctness patches, are warnings,
    each once in the process. The same is a NotMetError for a patch of `require`, and under `strict` for a correctness
    patch, except for an unknown one: that is never more than a warning. An idle patch is one only if it is required.
    Ranks that differ are a NotMetError. Logs one INFO line on rank 0.
    """
    with contextlib.suppress(NotMetError):  # _in_force() raises it again, when all ranks have taken part
        _engine.ENGINE.catch_up()
    current = _engine.ENGINE.plan
    # Gather before anything raises: a rank that does not take part would leave the others waiting.
    effects = {} if current is None else _engine.ENGINE.effects(current)
    from shim._engine.ranks import ranks_that_differ  # here, because apply() compares none

    differing = ranks_that_differ(*_compared(current), group, effects)
    current = _in_force("check")
    models = [model] if hasattr(model, "modules") else None if model is None else list(model)
    report = _engine.ENGINE.check(models, current)
    _judge(report, current.options)
    if differing:
        raise NotMetError(
            f"ranks disagree about what is applied: {differing}. Remedy: on every rank, install the same releases, "
            "megatron-shim included, call shim.apply() with the same arguments, and make the same other patches."
        )
    if is_rank_zero():
        logger().info("%s", "; ".join(filter(None, [report.summary, report.concern])))
    return report


def _compared(current: Plan | None) -> tuple[str, dict[str, tuple[str, ...]], dict[str, str]]:
    """Ranks compare: the digest, the part of each patch in it (empty if not applied), and the releases."""
    from shim._engine.ranks import NOTHING, OWN_CODE, PACKAGES, PARTS

    if current is None:
        return NOTHING, {}, {}
    from shim._planning.digest import summary_of  # here, because apply() asks for no digest

    identity = current.identity
    here = identity["patches"]
    patches = {
        id: tuple(json.dumps(here[id][part], sort_keys=True) for part in PARTS) if id in here else ()
        for id in current.decisions
    }
    code, packages = identity["code"], identity["packages"]
    compared = {**identity["releases"], "the matrix": identity["matrix"]}
    compared[OWN_CODE] = f"{identity['releases']['megatron-shim']} {summary_of(code)}"
    if packages:
        compared[PACKAGES] = summary_of(packages)
    return current.digest, patches, compared


def _beyond_the_words(report: Report, options: Options) -> str:
    """What the models need of the patches that `concerns` has left out: silent defects first; "" if nothing."""
    left = sorted(
        (p for p in report.patches.values() if p.state == "not-concerned" and p.kind == "correctness"),
        key=lambda patch: patch.symptom != "silent",
    )
    needed = [f"{patch.id} ({patch.without or patch.summary})" for patch in left if patch.concerns == "yes"]
    if not needed:
        return ""
    more = sum(patch.concerns == "unknown" for patch in left)
    return (
        f"this model needs {'; '.join(needed)}, which concerns={_shortened(options.concerns or ())} leaves out"
        f"{f'; it may need {more} more' if more else ''}. Remedy: name all that the run has, or leave concerns out."
    )


def _shortened(words: Sequence[str]) -> str:
    return ",".join(words) if len(words) <= NAMED else f"{','.join(words[:NAMED])},..."


def _judge(report: Report, options: Options) -> None:
    if beyond := _beyond_the_words(report, options):
        if options.strict:
            raise NotMetError(f"shim.check: strict, but {beyond}")
        _engine.ENGINE.warn([beyond])
    for patch in report.patches.values():
        # apply() has warned of the targets that it left to other code.
        if patch.state == "applied" and "lost" in patch.targets.values() and patch.kind == "correctness":
            what = "; ".join(patch.others)
            _engine.ENGINE.warn_patch([(patch.id, "applied in part", what, f"{patch.id} is applied in part: {what}")])
        if not _is_problem(patch, patch.id in options.require):
            continue
        text = f"{patch.id} is {patch.state}: {patch.reason}." + (f" Remedy: {patch.remedy}." if patch.remedy else "")
        if patch.state != "unknown" and (
            patch.id in options.require or (options.strict and patch.kind == "correctness")
        ):
            raise NotMetError(f"shim.check: required, but {text}")
        _engine.ENGINE.warn_patch([(patch.id, patch.state, patch.reason, text)])


def _is_problem(patch: PatchReport, required: bool) -> bool:
    if patch.state == "unknown" and not required and patch.kind in ("performance", "feature"):
        return False  # without the patch the model trains right, too
    if patch.state == "idle":
        return required
    if patch.state == "inactive":
        return required or patch.kind != "feature"  # the feature may not be wanted
    return patch.state in ("pending", "unknown", "shadowed", "conflict", "failed") or (
        patch.state == "drifted" and patch.kind == "correctness"
    )


def checkpoint_state() -> dict[str, Any]:
    """Return what a training checkpoint should keep about the patches in force: plain data of a few kB.

    Raises OptionError if nothing was applied in this process.
    """
    from shim._planning.resume import state_of

    return state_of(_in_force("checkpoint_state"))


def check_resume(saved: Mapping[str, Any] | str | None) -> bool:
    """Say whether the patches that a checkpoint was trained with are in force. A WARNING names every difference.

    saved: what `checkpoint_state` returned, or a ``report.digest``. None, for a checkpoint that has neither, counts
    as a difference. Raises OptionError if nothing was applied in this process.
    """
    from shim._planning.resume import differs

    found = differs(saved, _in_force("check_resume"))
    if found:
        logger().warning(
            "the checkpoint was trained with other patches than are in force now: %s. Remedy: install what it was "
            "trained with, or go on if the change is meant.",
            found,
        )
    return not found


def _in_force(caller: str) -> Plan:
    _engine.ENGINE.renew_plan()
    current = _engine.ENGINE.plan
    if current is None:
        raise OptionError(f"nothing was applied in this process; call shim.apply() before shim.{caller}()")
    return current


def explain(id: str, verbose: bool = True) -> str:
    """Return a text: what a patch is for, how it is wired, what was decided about it here, and why.

    verbose: also how it works, and its releases, variants and targets.
    """
    from shim._planning.texts import explanation

    with contextlib.suppress(NotMetError):
        _engine.ENGINE.renew_plan()
    made = _engine.ENGINE.plan or default_plan()
    if id not in made.decisions:
        raise OptionError(f"there is no patch {id!r}; {did_you_mean(id, made.decisions)}")
    return explanation(made, id, verbose)

"""Somebody's own functions in the place of methods, tried in a model: what becomes of the patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shim._engine.conflicts import remedy_for
from shim._engine.probes import Verdict
from shim._engine.records import Records
from shim._engine.replacements import Question, is_tried
from shim._engine.report import NOT_KNOWN, PatchReport
from shim._engine.tries import Tries
from shim._engine.verify import reason_of
from shim._errors import BindError
from shim._planning.plan import Plan
from shim._record import replace

__all__ = ["with_answers"]


def with_answers(
    patches: dict[str, PatchReport], models: list[Any], plan: Plan, binder: Records, tries: Tries
) -> dict[str, PatchReport]:
    """The reports of patches, with what trying somebody's own functions in these models has shown.

    A function that keeps what the patch does leaves it ``applied``, and `others` says so. One that does not is a
    ``conflict``. Where trying cannot tell, the patch is ``pending``, and the reason begins "not known".
    """
    for (id, target), question in binder.found.open.items():
        if patches[id].state in ("applied", "pending"):
            verdict, why = _verdict(question, models, plan, binder, tries)
            patches[id] = _answered(patches[id], target, question, verdict, why, plan, binder)
    for question in _around(plan, binder):
        if patches[question.patch].state == "applied":
            verdict, why = _verdict(question, models, plan, binder, tries)
            kept = binder.found.around[question.patch, question.target].why.startswith("keeps")
            if verdict is False or (verdict is None and not kept):
                patches[question.patch] = _answered(
                    patches[question.patch], question.target, question, verdict, why, plan, binder
                )
    return patches


def _around(plan: Plan, binder: Records) -> Iterator[Question]:
    """The functions that patches go around, where a patch can try them."""
    for (id, target), found in binder.found.around.items():
        chain = binder.chains.get(target)
        if chain is not None and is_tried(target, plan[id], plan) and plan[id].wanted:
            yield Question(id, target, target, chain.base, found.who)


def _verdict(question: Question, models: list[Any], plan: Plan, binder: Records, tries: Tries) -> Verdict:
    """The worst of the verdicts on all modules that run the function; True if none does."""
    try:
        owner = binder.resolve(question.method)[0]
    except BindError as error:
        return None, str(error)
    found: Verdict = True, ""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, owner):
            verdict = tries.of(plan[question.patch], question.method, module, question.function)
            if verdict[0] is False:
                return verdict
            found = verdict if verdict[0] is None else found
    return found


def _answered(
    patch: PatchReport, target: str, question: Question, verdict: bool | None, why: str, plan: Plan, binder: Records
) -> PatchReport:
    said = f"{question.method} is replaced by {question.who}"
    others = tuple(text for text in patch.others if not text.startswith(said))
    if verdict is False:
        without = plan.matrix.patches[patch.id].without
        reason = f"{said}, which keeps the patch from its effect" + (f"; {without}" if without else "")
        targets = {**patch.targets, target: "lost"}
        return replace(
            patch, state="conflict", reason=reason, targets=targets, remedy=remedy_for(patch.id, question.who)
        )
    if verdict is None:
        reason = f"{NOT_KNOWN}: {said}, and {why or 'nobody knows what becomes of the patch'}"
        mark = f"where a test shows that {question.who} trains right, mark it with shim.compatible({target!r})"
        targets = {**patch.targets, target: "unknown"}
        return replace(patch, state="pending", reason=reason, targets=targets, remedy=f"{mark}; or exclude {patch.id}")
    # What is not on the target itself leaves the target bound.
    targets = {**patch.targets, target: "kept" if question.method == target else "bound"}
    others = (*others, f"{said}; on this model the patch loses nothing by it")
    done = patch.in_doubt and {"untried", "unknown"}.isdisjoint(targets.values())
    if not done:
        return replace(patch, targets=targets, others=others)
    return replace(
        patch, state="applied", reason=reason_of(plan[patch.id], binder), targets=targets, others=others, remedy=""
    )

"""Foreign functions in the place of upstream's, tried, methods in a model: do patches keep their effect?"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from shim._engine.aliases import namespace_of
from shim._engine.conflicts import remedy_for, remedy_untried
from shim._engine.foreign import is_upstreams
from shim._engine.probes import NO_VERDICT, NOT_YET, Tries, Verdict
from shim._engine.reach import UPSTREAM
from shim._engine.records import Records
from shim._engine.replacements import Question, is_method, is_tried
from shim._engine.states import UNSETTLED, Claim, States
from shim._errors import BindError
from shim._planning.plan import Plan
from shim._releases.fingerprint import split_target

__all__ = ["add_answers"]


def add_answers(states: States, models: list[Any], plan: Plan, binder: Records, tries: Tries) -> None:
    """Add what trying foreign functions in these models has shown.

    A function that keeps what the patch does leaves it ``applied``, and `others` says so. One that does not is a
    ``conflict``. If trying cannot tell, the patch is ``unknown``.
    """
    for question in binder.found.open.values():
        if (models or not is_method(question.method)) and states[question.patch].state in UNSETTLED:
            states.add(_answer(question, *_verdict(question, models, plan, binder, tries), plan))
    for question in _around(plan, binder):
        if states[question.patch].state == "applied":
            verdict, why = _verdict(question, models, plan, binder, tries)
            kept = binder.found.around[question.patch, question.target].why.startswith("keeps")
            if verdict is False or (verdict is None and not kept):
                states.add(_answer(question, verdict, why, plan))


def _around(plan: Plan, binder: Records) -> Iterator[Question]:
    """The functions that patches go around, if a patch can try them."""
    for (id, target), found in binder.found.around.items():
        chain = binder.chains.get(target)
        if chain is not None and is_tried(target, plan[id], plan) and plan[id].wanted:
            yield Question(id, target, target, chain.base, found.who)


def _verdict(question: Question, models: list[Any], plan: Plan, binder: Records, tries: Tries) -> Verdict:
    """The worst of the verdicts on all modules that run a method, True if none does; of a function that of itself."""
    if not is_method(question.method):
        places = _holding_upstreams(question, plan)
        if places:
            return None, f"{', '.join(places)} still hold upstream's own function"
        return tries.of(plan[question.patch], question.method, question.function, question.function)
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


def _holding_upstreams(question: Question, plan: Plan) -> list[str]:
    """The names of modules that hold upstream's own function, taken before another came into its place."""
    name = split_target(question.target)[1]
    found = []
    for module in [module for key, module in list(sys.modules.items()) if key.startswith(UPSTREAM)]:
        for alias, value in list(namespace_of(module).items()):
            named = type(value) is types.FunctionType and value.__name__ == name and value is not question.function
            if named and is_upstreams(question.target, value, plan.environment.sources):
                found.append(f"{module.__name__}.{alias}")
    return found


def _where(question: Question) -> str:
    return "on this model" if is_method(question.method) else "as tried"


def _answer(question: Question, verdict: bool | None, why: str, plan: Plan) -> Claim:
    id, target, who = question.patch, question.target, question.who
    said = f"{question.method} is replaced by {who}"
    if verdict is False:
        without = plan.matrix.patches[id].without
        reason = f"{said}, which keeps the patch from its effect" + (f"; {without}" if without else "")
        return Claim(id, "conflict", reason, remedy_for(id, who), target, "lost")
    if verdict is None:
        reason = f"{said}, and {why or NO_VERDICT}"
        remedy = f"if a test shows that {who} trains right, mark it with shim.compatible({target!r}); or exclude {id}"
        remedy = remedy_untried(question.method, who) if why == NOT_YET else remedy
        return Claim(id, "unknown", reason, remedy, target, "unknown", replaces=UNSETTLED)
    # What is not on the target itself leaves the target bound.
    mark = "kept" if question.method == target else "bound"
    return Claim(id, "applied", f"{said}; {_where(question)} the patch loses nothing by it", "", target, mark, said)

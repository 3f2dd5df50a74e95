"""Overrides of patched methods, and other people's functions: found, read, and tried on a tiny input."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from shim._engine.chains import Records
from shim._engine.conflicts import remedy_for, remedy_untried
from shim._engine.foreign import Question, is_method, is_tried, is_upstreams
from shim._engine.names import namespace_of, unwrap
from shim._engine.reach import (
    UPSTREAM,
    Read,
    held_by,
    is_attribute,
    layers_of,
    reads_of,
    value_of,
    written_layers_of,
    written_of,
)
from shim._engine.states import UNSETTLED, Claim, States
from shim._errors import BindError
from shim._planning.plan import Decision, Plan
from shim._record import record
from shim._releases.fingerprint import split_target
from shim._torch_names import required

__all__ = [
    "NO_VERDICT",
    "Override",
    "Tries",
    "Verdict",
    "add_answers",
    "calls",
    "facts_of",
    "of_patch",
    "overrides_of",
    "run",
]


# Overrides: where they stand in a model, and whether they call what they override


@record
class Override:
    """A function that an instance runs instead of the method `name` of the class that shim patched.

    function: without descriptor, and not bound.
    does: who overrides what, in words, with file and line.
    beneath: the classes whose methods `super()` finds from there.
    kept: the attributes under which the instance keeps the patched method, as those do who mean to put it back.
    """

    function: Any
    name: str
    does: str
    beneath: tuple[type, ...]
    kept: frozenset[str]


def overrides_of(module: Any, owner: type, name: str, fixed: Any, beneath: Callable[[Any], Any]) -> Iterator[Override]:
    """The overrides of the method `name` of `owner` that stand between an instance and that class, from the outside.

    beneath: what lies beneath a function of shim's; None if it is shim's alone. What shim binds overrides nothing.
    """
    mro, held = type(module).__mro__, getattr(module, "__dict__", {})
    methods = [(key, value) for key, value in held.items() if type(value) is types.MethodType and key != name]
    kept = frozenset(key for key, value in methods if value.__func__ is fixed)
    own = held.get(name)
    function = own.__func__ if type(own) is types.MethodType else own
    if own is not None and function is not fixed:
        cls = type(module)
        does = f"an instance of {cls.__module__}.{cls.__qualname__} holds another {name} ({_place(function, cls)})"
        yield Override(function, name, does, mro, kept)
    for place, holder in enumerate(mro):
        if holder is owner:
            return
        if name in namespace_of(holder):
            function = unwrap(namespace_of(holder)[name])
            if function is fixed:
                return
            function = unwrap(beneath(function))
            if function is None:
                continue
            where = _place(function, holder)
            does = f"{holder.__module__}.{holder.__qualname__} ({where}) overrides {name}"
            yield Override(function, name, does, mro[place + 1 :], kept)


def _place(function: Any, cls: type) -> str:
    """File and line of a function; the file of `cls` if the function is no Python function."""
    code = getattr(written_of(function), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def calls(override: Override, fixed: Sequence[Any]) -> bool:
    """Whether an override calls the method that it overrides, or a function of `fixed` itself.

    It does if its code reads `super().name`, `Class.name` or an attribute that keeps the method, or if its closure,
    its defaults or its partial hold the method, as those of a wrapper do. Which branch runs is not followed. An object
    without code calls nothing.
    """
    held = [value for layer in layers_of(override.function, fixed) for value in held_by(layer, 1) if value is not layer]
    # Types are asked of type(), because a closure may hold a lazy object.
    bare = [value.__func__ if type(value) is types.MethodType else value for value in held]
    if any(value is function for value in bare for function in fixed):
        return True
    return any(
        _is_way_to(read, layer, override)
        for layer in written_layers_of(override.function, fixed)
        for read in reads_of(getattr(layer, "__code__", None))
    )


def _is_way_to(read: Read, function: Any, override: Override) -> bool:
    """Whether a path in the code of a function is the overridden method of a base class, or an attribute keeping it."""
    before, last = read[:-1], read[-1]
    if not is_attribute(read) or last not in (override.name, *override.kept):
        return False
    if (
        last in override.kept
        or before == ("super",)
        or any(value_of(before, function) is base for base in override.beneath)
    ):
        return True
    return is_attribute(before) and before[-1] in {base.__name__ for base in override.beneath}


Probe = Callable[[Any, str, list[Any]], "bool | str | None"]
Verdict = tuple["bool | None", str]  # the second says why nothing is known
# A patch's probe: what an override does to a tiny input, tried once, with nothing left behind
#
# A patch module may define `probe(module, method, models)`. It gets the instance, the overridden method as
# ``package.module:Class.name``, and the models that check() was given. In the place of a function that is no method
# it gets the foreign function itself, and no model is needed. It returns True (the override keeps the fix), False
# (the override hides it), or None or a text (not known, and why).


MOST_VERDICTS = 1000
NOT_YET = "shim.check has not tested yet whether the patch has its effect"
NO_VERDICT = "shim cannot tell whether the patch has its effect"  # if it says nothing


def run(probe: Probe, module: Any, method: str, models: list[Any]) -> Verdict:
    """The verdict of a probe. An exception, also of the override, means that nothing is known."""
    try:
        with _undisturbed(module):
            found = probe(module, method, models)
    except Exception as error:  # noqa: BLE001 - the override belongs to others, and a check must not fail by it
        text = str(error).strip().partition("\n")[0]
        return None, f"trying it raised {type(error).__name__}" + (f": {text}" if text else "")
    return found if isinstance(found, bool) else None, found if isinstance(found, str) else ""


@contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Gradients on, warnings off, messages between ranks refused; afterwards random state and all modes as before."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch = sys.modules.get("torch")
        if torch is not None:
            device = _device_of(module, torch)
            if device.type == "cpu":
                stack.enter_context(torch.random.fork_rng(devices=[]))
            else:
                stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_no_messages())
        yield


def _device_of(module: Any, torch: Any) -> Any:
    parameters = getattr(module, "parameters", None)
    first = next(iter(parameters()), None) if parameters is not None else None
    device = torch.device("cpu") if first is None else first.device
    if device.type == "meta":
        raise ValueError("the weights are on the meta device; check the model once it has its weights")
    return device


def _no_messages() -> Any:
    """A mode that refuses collectives and messages: other ranks may have no such override, and would not answer."""

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"it sends messages between ranks ({function})")
        return function(*args, **(kwargs or {}))

    mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")
    made: Any = type("NoMessages", (mode,), {"__torch_dispatch__": dispatch})
    return made()


def facts_of(module: Any) -> tuple[Any, ...]:
    """What the verdict on an override may depend on, besides the override: the module's config, and what is frozen."""
    config = getattr(module, "config", None)
    plain = (bool, int, float, str, type(None))
    options = tuple((name, value) for name, value in getattr(config, "__dict__", {}).items() if type(value) in plain)
    parameters = getattr(module, "parameters", None)
    trained = {weight.requires_grad for weight in parameters()} if parameters is not None else set()
    return hash(options), bool(getattr(module, "training", True)), frozenset(trained)


def of_patch(decision: Decision, plan: Plan, name: str) -> Any:
    """A function of the patch's module, if the module is loaded and has it; else None."""
    module = sys.modules.get(plan.matrix.patches[decision.id].module)
    return None if module is None else namespace_of(module).get(name)


class Tries:
    """The verdicts of probes on these models. Each function is tried once, and again if its module differs.

    trying: whether this is check(). A report only repeats what check() has found.
    """

    def __init__(self, plan: Plan, models: list[Any], verdicts: dict[Any, Verdict], trying: bool) -> None:
        self.plan, self.models, self.verdicts, self.trying = plan, models, verdicts, trying
        self._facts: dict[int, Any] = {}
        self._of_models: Any = None

    def _facts_of_models(self) -> Any:
        if self._of_models is None:
            self._of_models = tuple((type(model).__qualname__, facts_of(model)) for model in self.models)
        return self._of_models

    def of(self, decision: Decision, method: str, module: Any, function: Any) -> Verdict:
        """What the patch's probe says of `function`, which `module` runs as `method`."""
        probe = of_patch(decision, self.plan, "probe")
        if probe is None:
            return None, "shim cannot test whether the patch has its effect"
        if id(module) not in self._facts:
            self._facts[id(module)] = facts_of(module), self._facts_of_models()
        what = (decision.id, decision.variant, repr(sorted(decision.options.items())), method)
        key = (what, getattr(function, "__code__", function), type(module).__qualname__, self._facts[id(module)])
        if key not in self.verdicts:
            if not self.trying:
                return None, NOT_YET
            if len(self.verdicts) >= MOST_VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = run(probe, module, method, self.models)
        return self.verdicts[key]


# Foreign functions in the place of upstream's, tried, methods in a model: do patches keep their effect?


def add_answers(states: States, models: list[Any], plan: Plan, binder: Records, tries: Tries) -> None:
    """Add what trying foreign functions in these models has shown.

    A function that keeps what the patch does leaves it ``applied``, and `others` says so. One that does not is a
    ``conflict``. If trying cannot tell, the patch is ``unknown``.
    """
    for question in binder.found.open.values():
        if (models or not is_method(question.method)) and states[question.patch].state in UNSETTLED:
            states.add(_answer(question, *_verdict(question, models, plan, binder, tries), plan))
    for question in _around(plan, binder):
        if (models or not is_method(question.method)) and states[question.patch].state == "applied":
            verdict, why = _verdict(question, models, plan, binder, tries)
            if not verdict:
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
        # What callers reach; if the patch goes around the function, that is the patch.
        chain = binder.chains.get(question.method)
        reached = question.function if chain is None or question.function is not chain.base else chain.top
        return tries.of(plan[question.patch], question.method, reached, question.function)
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
    name = split_target(question.method)[1]
    found = []
    for module in [module for key, module in list(sys.modules.items()) if key.startswith(UPSTREAM)]:
        for alias, value in list(namespace_of(module).items()):
            named = type(value) is types.FunctionType and value.__name__ == name and value is not question.function
            if named and is_upstreams(question.method, value, plan.environment.sources):
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

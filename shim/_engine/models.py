"""Step 5, verify: whether bound patches take effect on a model, and concern it; what overrides in it do, when tried."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from itertools import takewhile
from typing import Any

from shim._compatible import marks_of
from shim._configs.of_models import parameters_of, run_of_models
from shim._engine.chains import Question, Records
from shim._engine.foreign import is_upstreams
from shim._engine.names import Chain, Key, namespace_of, unwrap
from shim._engine.reach import (
    UPSTREAM,
    Read,
    held_by,
    is_attribute,
    is_releases_own,
    layers_of,
    leads_to,
    reads_of,
    value_of,
    written_layers_of,
    written_of,
)
from shim._engine.report import Checked, Report, is_method, is_tried, remedy_for, remedy_untried, switched_off
from shim._engine.states import UNSETTLED, Claim, States
from shim._errors import BindError, ShimError
from shim._planning.plan import Decision, Plan
from shim._record import computed_once, record
from shim._releases.fingerprint import split_target
from shim._torch_names import required

__all__ = ["facts_of", "run", "with_findings"]


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


# A patch's probe: what an override does to a tiny input, tried once, with nothing left behind (docs/patch-modules.md)


Probe = Callable[[Any, str, list[Any]], "bool | str | None"]
Verdict = tuple["bool | None", str]  # the second says why nothing is known

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
    first = next(parameters_of(module), None)
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
    trained = frozenset(weight.requires_grad for weight in parameters_of(module))
    return hash(options), bool(getattr(module, "training", True)), trained


def of_patch(decision: Decision, plan: Plan, name: str) -> Any:
    """A function of the patch's module, if the module is loaded and has it; else None."""
    module = sys.modules.get(plan.matrix.patches[decision.id].module)
    return None if module is None else namespace_of(module).get(name)


@record
class Tries:
    """The verdicts of probes on these models. Each function is tried once, and again if its module differs.

    trying: whether this is check(). A report only repeats what check() has found.
    facts: id() of a module -> what the verdicts on it may depend on.
    """

    plan: Plan
    models: list[Any]
    verdicts: dict[Any, Verdict]
    trying: bool
    facts: dict[int, Any] = field(default_factory=dict)

    @computed_once
    def facts_of_models(self) -> tuple[Any, ...]:
        return tuple((type(model).__qualname__, facts_of(model)) for model in self.models)

    def of(self, decision: Decision, method: str, module: Any, function: Any) -> Verdict:
        """What the patch's probe says of `function`, which `module` runs as `method`."""
        probe = of_patch(decision, self.plan, "probe")
        if probe is None:
            return None, "shim cannot test whether the patch has its effect"
        if id(module) not in self.facts:
            self.facts[id(module)] = facts_of(module), self.facts_of_models
        what = (decision.id, decision.variant, repr(sorted(decision.options.items())), method)
        key = (what, getattr(function, "__code__", function), type(module).__qualname__, self.facts[id(module)])
        if key not in self.verdicts:
            if not self.trying:
                return None, NOT_YET
            if len(self.verdicts) >= MOST_VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = run(probe, module, method, self.models)
        return self.verdicts[key]


# Foreign functions in the place of upstream's, tried, methods in a model: do patches keep their effect?


def _add_answers(states: States, binder: Records, tries: Tries) -> None:
    """Add what trying foreign functions in these models has shown.

    A function that keeps what the patch does leaves it ``applied``, and `others` says so. One that does not is a
    ``conflict``. If trying cannot tell, the patch is ``unknown``.
    """
    plan = tries.plan
    for question in binder.found.open.values():
        if (tries.models or not is_method(question.method)) and states[question.patch].state in UNSETTLED:
            states.add(_answer(question, *_verdict(question, binder, tries), plan))
    for (id, target), who in binder.found.around.items():
        chain = binder.chains.get(target)
        tried = chain is not None and plan[id].wanted and is_tried(target, plan[id], plan)
        if chain is not None and tried and (tries.models or not is_method(target)) and states[id].state == "applied":
            question = Question(id, target, target, chain.base, who)
            verdict, why = _verdict(question, binder, tries)
            if not verdict:
                states.add(_answer(question, verdict, why, plan))


def _verdict(question: Question, binder: Records, tries: Tries) -> Verdict:
    """The worst of the verdicts on all modules that run a method, True if none does; of a function that of itself."""
    if not is_method(question.method):
        places = _holding_upstreams(question, tries.plan)
        if places:
            return None, f"{', '.join(places)} still hold upstream's own function"
        # What callers reach; if the patch goes around the function, that is the patch.
        chain = binder.chains.get(question.method)
        reached = question.function if chain is None or question.function is not chain.base else chain.top
        return tries.of(tries.plan[question.patch], question.method, reached, question.function)
    try:
        owner = binder.resolve(question.method)[0]
    except BindError as error:
        return None, str(error)
    found: Verdict = True, ""
    for module in (module for model in tries.models for module in model.modules()):
        if isinstance(module, owner):
            verdict = tries.of(tries.plan[question.patch], question.method, module, question.function)
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


def _answer(question: Question, verdict: bool | None, why: str, plan: Plan) -> Claim:
    id, target, who = question.patch, question.target, question.who
    said = f"{question.method} is replaced by {who}"
    if verdict is False:
        reason = _with_its_defect(id, f"{said}, which keeps the patch from its effect", plan)
        return Claim(id, "conflict", reason, remedy_for(id, who), target, "lost")
    if verdict is None:
        reason = f"{said}, and {why or NO_VERDICT}"
        remedy = f"if a test shows that {who} trains right, mark it with shim.compatible({target!r}); or exclude {id}"
        remedy = remedy_untried(question.method, who) if why == NOT_YET else remedy
        return Claim(id, "unknown", reason, remedy, target, "unknown", replaces=UNSETTLED)
    # What is not on the target itself leaves the target bound.
    mark = "kept" if question.method == target else "bound"
    where = "on this model" if is_method(question.method) else "as tried"
    return Claim(id, "applied", f"{said}; {where} the patch loses nothing by it", "", target, mark, said)


def _with_its_defect(id: str, reason: str, plan: Plan) -> str:
    without = plan.matrix.patches[id].without
    return f"{reason}; {without}" if without else reason


# Functions that a model took while shim had not bound them, such as config.finalize_model_grads_func


def _stale_references(modules: Iterable[Any], plan: Plan, binder: Records) -> Iterator[Claim]:
    """The attributes of modules and of their configs that hold the function of a target as it was before it was bound.

    Methods are left out: a model runs a method of its class by its name, and if it holds one under another name,
    mostly to put it back, it may never run that one. Closures and containers are out of reach.
    """
    wanted: dict[int, list[tuple[str, str]]] = {}
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is not None and type(chain.owner) is types.ModuleType:
                base = chain.beneath
                if type(base) is types.FunctionType and base is not chain.inner:
                    wanted.setdefault(id(base), []).append((decision.id, target))
    holders: dict[int, tuple[Any, str, str]] = {}
    for module in modules if wanted else ():
        owner = f"{type(module).__module__}.{type(module).__qualname__}"
        holders.setdefault(id(module), (module, "", owner))
        config = getattr(module, "config", None)
        holders.setdefault(id(config), (config, "config.", owner))
    for holder, prefix, owner in holders.values():
        held = getattr(holder, "__dict__", {})
        for name, value in list(held.items()) if type(held) is dict else ():
            function = value.func if type(value) is functools.partial else value
            for patch, target in wanted.get(id(function), ()):
                place = f"{prefix}{name} of {owner}"
                text = f"{place} holds upstream's own {target.partition(':')[2]}, taken before shim bound it"
                yield Claim(patch, "unknown", text, f"set {place} again, or {EARLIER}", target, "unknown")


# What keeps a patch from its effect on a model


def with_findings(
    report: Report, models: list[Any], plan: Plan, binder: Records, checked: Checked, *, raising: bool
) -> Report:
    """The report, with what overrides in these models do to the patches, and whether each concerns them. No lock.

    Without a model it has what trying functions of modules has shown.

    raising: whether this is check(). Only check() raises an error in a patch's own check; a report says that the
        patch is inactive. And only check() tries overrides: another thread may train while a report is made.
    """
    states = States(report, plan, binder)
    tries = Tries(plan, models, checked.verdicts, raising)
    _add_answers(states, binder, tries)
    if not models:
        return states.report()
    for claims in (_problems_in(models, plan, raising), _findings_in(models, plan, binder, tries)):
        for claim in claims:
            states.add(claim)
    run = run_of_models(models, "transformer-engine" in plan.environment.installed)
    known = plan.matrix.patches
    found = states.report()
    patches = {
        id: replace(patch, concerns=run.concern_of(known[id].concerns), not_known=run.missing_words(known[id].concerns))
        for id, patch in found.patches.items()
    }
    return replace(found, patches=patches)


CALL_IT = "call the method of the base class in the override, or drop the override"
EARLIER = "call shim.apply() before the model is built"
FIND_OUT = (
    "call the method of the base class in the override; or, if a test shows that the override trains right, mark it "
    "with shim.compatible(TARGET)"
)


def _problems_in(models: list[Any], plan: Plan, raising: bool) -> Iterator[Claim]:
    """Why patches have no effect on the models, from switches and from `problems` of patches."""
    for decision in plan.decisions.values():
        off = plan.matrix.patches[decision.id].off_by(decision.options) if decision.wanted else ()
        if off:
            yield Claim(decision.id, "inactive", *switched_off(decision.id, off))
            continue
        find = of_patch(decision, plan, "problems") if decision.wanted else None
        try:
            for what, remedy in find(models) if find is not None else ():
                yield Claim(decision.id, "inactive", what, remedy)
        except ShimError as error:
            if raising:
                raise
            yield Claim(decision.id, "inactive", str(error))


def _findings_in(models: list[Any], plan: Plan, binder: Records, tries: Tries) -> Iterator[Claim]:
    """What each override of a patched method does, and each override of a method that reaches a patched function."""
    instances = [module for item in models for module in item.modules()]
    yield from _stale_references(instances, plan, binder)
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is None or binder.loaded(split_target(target)[0]) is None:
                continue
            now = unwrap(namespace_of(chain.owner).get(chain.name))
            fixed = tuple(value for value in (chain.inner, now) if value is not None)
            for method, owner in _ways_to(chain, decision, binder):
                seen: set[Any] = set()
                judge = _Judge(decision, target, method, tries, binder)
                for module in instances:
                    if isinstance(module, owner):
                        found = judge.of(module, owner, fixed)
                        yield from (item for item in found if item not in seen)
                        seen.update(found)


def _ways_to(chain: Chain, decision: Decision, binder: Records) -> Iterator[tuple[str, type]]:
    """The methods whose overrides may hide the object on a target, each with its class."""
    if isinstance(chain.owner, type):
        yield chain.target, chain.owner
    for method in decision.reached_by.get(chain.target, ()):
        owner: Any = binder.loaded(split_target(method)[0])
        for part in split_target(method)[1].split(".")[:-1]:
            owner = None if owner is None else namespace_of(owner).get(part)
        if isinstance(owner, type):
            yield method, owner


@record
class _Judge:
    """Judges the overrides of one method on one way to a target of a patch."""

    decision: Decision
    target: str
    method: str
    tries: Tries
    binder: Records

    @computed_once
    def bound(self) -> list[Key]:
        """The names of targets that the patch has bound."""
        bound = [target for target in self.decision.targets if self.binder.bound(self.decision.id, target)]
        return [self.binder.chains[target].key for target in bound]

    def of(self, module: Any, owner: type, fixed: tuple[Any, ...]) -> list[Claim]:
        name = self.method.rpartition(".")[2]
        direct = self.method == self.target
        nearer = takewhile(lambda holder: holder is not owner, type(module).__mro__)
        if direct and any((id(holder), name) in self.bound for holder in nearer):
            return []  # the patch binds the method of a nearer class, too, and that target is judged
        below = fixed[0] if direct else unwrap(namespace_of(owner).get(name))
        found: list[Claim] = []
        for override in overrides_of(module, owner, name, below, self.binder.beneath):
            if direct and override.function in fixed:
                break
            marks = marks_of(override.function)
            marked = next((marks[key] for key in (self.target, self.method) if key in marks), None)
            if marked is not None:
                return [
                    *found,
                    self._harmless(f"{override.does}, and says that it keeps {self.target}, as of shim {marked}"),
                ]
            releases = is_releases_own(override.function)
            if calls(override, fixed if direct else (below,)):
                if not releases:
                    found.append(self._harmless(f"{override.does} and calls it"))
                continue
            tried = self._tried(module, override)
            # What an override names may still get the wrong arguments, so trying it comes before reading it.
            if tried.state == "unknown" and not direct and leads_to(override.function, fixed):
                tried = self._harmless(f"{override.does} and calls {self.target.partition(':')[2]}")
            return found if releases and not tried.state else [*found, tried]
        return found

    def _harmless(self, text: str) -> Claim:
        return Claim(self.decision.id, "", text)

    def _tried(self, module: Any, override: Override) -> Claim:
        verdict, why = self.tries.of(self.decision, self.method, module, override.function)
        id, text = self.decision.id, f"{override.does} without calling it"
        if verdict:
            return self._harmless(f"{text}; on this model the patch loses nothing by it")
        if verdict is None:
            return Claim(id, "unknown", f"{text}, and {why or NO_VERDICT}", FIND_OUT, self.target, "unknown")
        reason = f"{self.target}: {text}, and keeps the patch from its effect"
        reason = _with_its_defect(id, reason, self.tries.plan)
        return Claim(id, "shadowed", reason, CALL_IT, self.target, "shadowed")

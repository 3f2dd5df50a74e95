"""Step 5, verify: whether bound patches take effect on a model, and concern it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from shim._compatible import marks_of
from shim._configs.settings import facts_from
from shim._engine.chains import Records
from shim._engine.checked import Checked
from shim._engine.names import Chain, namespace_of, unwrap
from shim._engine.overrides import NO_VERDICT, Override, Tries, add_answers, calls, of_patch, overrides_of
from shim._engine.reach import is_releases_own, leads_to
from shim._engine.report import Report, switched_off
from shim._engine.states import Claim, States
from shim._errors import ShimError
from shim._matrix.concerns import Run, given_facts
from shim._planning.plan import Decision, Plan
from shim._releases.fingerprint import split_target

__all__ = ["with_findings"]


# What models show of a run: their configs, their modules, and megatron's parallel state


# What megatron-core's config decides. A config without the setting belongs to a release without the feature.
_OF_CONFIG = (
    *("mtp", "moe", "router-replay", "mla", "gated-attention", "mamba", "gdn", "dsa", "mrope", "fused-rope"),
    *("expert-bias", "per-token-loss"),
    *("fp32-residual", "max-logit", "recompute", "fused-loss", "sp", "layout", "fp8", "cuda-graph"),
    *("tp", "cp", "pp", "ep"),
)
_CLASSES = {
    "MultiTokenPredictionLayer": "mtp",
    "MoELayer": "moe",
    "MultiLatentAttention": "mla",
    "MambaMixer": "mamba",
    "GatedDeltaNet": "gdn",
    "DSAttention": "dsa",
    "MultimodalRotaryEmbedding": "mrope",
}
_PARALLEL_STATE = "megatron.core.parallel_state"
_SIZE_FUNCTIONS = {
    "tp": "get_tensor_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
}


def run_of_models(models: Sequence[Any], plan: Plan) -> Run:
    """What the models show. Words that no config, module or group decides, such as packed rows, are not known."""
    modules = [module for model in models for module in model.modules()]
    # vars(), because an attribute of a user's module may be a property that does something.
    configs = {id(config): config for config in _values(modules, "config") if hasattr(config, "num_attention_heads")}
    facts = given_facts("transformer-engine" in plan.environment.installed)
    facts["lora"] = any(not p.requires_grad for model in models for p in _parameters(model))
    if configs:

        def read(name: str) -> list[Any]:
            found = [getattr(config, name) for config in configs.values() if hasattr(config, name)]
            return [*found, *_values(modules, name)]

        facts.update(dict.fromkeys(_OF_CONFIG, False) | facts_from(read, _OF_CONFIG))
    facts.update(dict.fromkeys(_words_of_classes(modules), True))
    facts.update({word: True for word, size in _sizes() if size > 1})
    sharded = [getattr(ddp, "use_distributed_optimizer", False) for ddp in _values(modules, "ddp_config")]
    if sharded:
        facts["distributed-optimizer"] = any(sharded)
    return Run(facts, "this model")


def _values(modules: Sequence[Any], name: str) -> Iterator[Any]:
    for module in modules:
        held = getattr(module, "__dict__", {})
        if name in held:
            yield held[name]


def _words_of_classes(modules: Sequence[Any]) -> set[str]:
    names = {base.__name__ for module in modules for base in type(module).__mro__}
    return {word for name, word in _CLASSES.items() if name in names}


def _sizes() -> Iterator[tuple[str, int]]:
    """The parallel sizes of this process, if megatron has made its groups."""
    state = sys.modules.get(_PARALLEL_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return
    for word, function in _SIZE_FUNCTIONS.items():
        yield word, getattr(state, function)()


def _parameters(model: Any) -> Iterator[Any]:
    """None of what check() also takes for a model: an object that only has modules()."""
    find = getattr(model, "parameters", None)
    yield from () if find is None else find()


# Functions that a model took while shim had not bound them, such as config.finalize_model_grads_func


class StaleReference(NamedTuple):
    """A place in a model that holds upstream's own function of a target."""

    patch: str
    target: str
    place: str


def stale_references(modules: Iterable[Any], plan: Plan, binder: Records) -> Iterator[StaleReference]:
    """The attributes of modules and of their configs that hold the function of a target as it was before it was bound.

    Methods are left out: a model runs a method of its class by its name, and if it holds one under another name,
    mostly to put it back, it may never run that one. Closures and containers are out of reach.
    """
    wanted: dict[int, list[tuple[str, str]]] = {}
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is not None and type(chain.owner) is types.ModuleType:
                base = unwrap(chain.base)
                if type(base) is types.FunctionType and base is not unwrap(chain.top):
                    wanted.setdefault(id(base), []).append((decision.id, target))
    if not wanted:
        return
    seen: set[int] = set()
    for module in modules:
        owner = f"{type(module).__module__}.{type(module).__qualname__}"
        for holder, prefix in ((module, ""), (getattr(module, "config", None), "config.")):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value in _namespace_of(holder).items():
                function = value.func if type(value) is functools.partial else value
                for patch, target in wanted.get(id(function), ()):
                    yield StaleReference(patch, target, f"{prefix}{name} of {owner}")


def _namespace_of(holder: Any) -> Mapping[str, Any]:
    found = getattr(holder, "__dict__", {})
    return dict(found) if type(found) is dict else {}


# What keeps a patch from its effect on a model


def with_findings(
    report: Report, models: list[Any], plan: Plan, binder: Records, checked: Checked, *, raising: bool
) -> Report:
    """The report, with what overrides in these models do to the patches. Called without the engine's lock.

    Without a model it has what trying functions of modules has shown.

    raising: whether this is check(). Only check() raises an error in a patch's own check; a report says that the
        patch is inactive. And only check() tries overrides: another thread may train while a report is made.
    """
    states = States(report, plan, binder)
    tries = Tries(plan, models, checked.verdicts, raising)
    add_answers(states, models, plan, binder, tries)
    if not models:
        return states.report()
    for claims in (_problems_in(models, plan, raising), _findings_in(models, plan, binder, tries)):
        for claim in claims:
            states.add(claim)
    return _with_concerns(states.report(), models, plan)


def _with_concerns(report: Report, models: list[Any], plan: Plan) -> Report:
    """The report, with whether each patch concerns these models."""
    run, known = run_of_models(models, plan), plan.matrix.patches
    patches = {
        id: replace(patch, concerns=run.concern_of(known[id].concerns), not_known=run.missing_words(known[id].concerns))
        for id, patch in report.patches.items()
    }
    return replace(report, patches=patches)


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
    for taken in stale_references(instances, plan, binder):
        text = f"{taken.place} holds upstream's own {taken.target.partition(':')[2]}, taken before shim bound it"
        remedy = f"set {taken.place} again, or {EARLIER}"
        yield Claim(taken.patch, "unknown", text, remedy, taken.target, "unknown")
    for decision in plan.decisions.values():
        for target in decision.targets if decision.wanted else ():
            chain = binder.chains.get(target)
            if chain is None or binder.loaded(split_target(target)[0]) is None:
                continue
            now = unwrap(namespace_of(chain.owner).get(chain.name))
            fixed = tuple(value for value in (unwrap(chain.top), now) if value is not None)
            for method, owner in _ways_to(chain, decision, binder):
                seen: set[Any] = set()
                judge = _Judge(decision, target, method, tries, plan.matrix.patches[decision.id].without, binder)
                for module in instances:
                    if isinstance(module, owner):
                        found = judge.of(module, owner, fixed)
                        yield from (item for item in found if item not in seen)
                        seen.update(found)


def _ways_to(chain: Chain, decision: Decision, binder: Records) -> Iterator[tuple[str, type]]:
    """The methods whose overrides may hide the object on a target, each with its class."""
    if isinstance(chain.owner, type):
        yield chain.target, chain.owner
    for method in decision.wiring.reached_by.get(chain.target, ()) if decision.wiring else ():
        owner: Any = binder.loaded(split_target(method)[0])
        for part in split_target(method)[1].split(".")[:-1]:
            owner = None if owner is None else namespace_of(owner).get(part)
        if isinstance(owner, type):
            yield method, owner


class _Judge:
    """Judges the overrides of one method on one way to a target of a patch."""

    def __init__(
        self, decision: Decision, target: str, method: str, tries: Tries, without: str, binder: Records
    ) -> None:
        self.target, self.method, self.without = target, method, without
        self.decision, self.tries, self.beneath = decision, tries, binder.wrappers.beneath
        bound = [binder.chains[each] for each in decision.targets if binder.bound(decision.id, each)]
        self.bound = [(chain.owner, chain.name) for chain in bound]

    def of(self, module: Any, owner: type, fixed: tuple[Any, ...]) -> list[Claim]:
        name = self.method.rpartition(".")[2]
        direct = self.method == self.target
        nearer = takewhile(lambda holder: holder is not owner, type(module).__mro__)
        if direct and any((holder, name) in self.bound for holder in nearer):
            return []  # the patch binds the method of a nearer class, too, and that target is judged
        below = fixed[0] if direct else unwrap(namespace_of(owner).get(name))
        found: list[Claim] = []
        for override in overrides_of(module, owner, name, below, self.beneath):
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
        reason += f"; {self.without}" if self.without else ""
        return Claim(id, "shadowed", reason, CALL_IT, self.target, "shadowed")

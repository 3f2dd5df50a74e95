"""Choose proofs by the plan, let workers run both sides of each, and judge."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shim._errors import NotMetError, OptionError
from shim._matrix.model import RIGHT, PatchEntry
from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._proving.kept import Kept
from shim._proving.processes import ENDED, Process
from shim._proving.reached import Spot
from shim._proving.results import Result, generic_verdict, outcome_of, verdict_of
from shim._proving.worker import MODEL, OVERRIDES, UNUSABLE, SideTask, Work

if TYPE_CHECKING:
    from shim.testing.proof import Proof

__all__ = ["SMALL_GPT", "Request", "prove", "prove_generic", "prove_model"]

SMALL_GPT = "shim.testing:build_gpt"  # a model of our own, which nobody patches at import
TE = "transformer-engine"
NOTHING_THERE = ("not-installed", "out-of-range", "excluded")


@dataclass(frozen=True)
class Request:
    """A request for proofs. ids: these patches; empty for all. ranks: the number for a proof over ranks.

    together: apply all patches on the patched side, not the patch alone. timeout: seconds for each side.
    trial: variants to apply whatever the bodies are, by patch. left: by patch the targets to do without.
    complete: raise NotMetError if a process ends without the answers, as when megatron-core cannot be imported.
    watch: for each patch the bodies of which an outcome is to say whether they ran. kept: answers of an earlier run.
    """

    ids: tuple[str, ...] = ()
    device: str = "cpu"
    ranks: int | None = None
    together: bool = False
    timeout: float = 120.0
    jobs: int = 2
    trial: Mapping[str, str] | None = None
    watch: Mapping[str, tuple[Spot, ...]] = field(default_factory=dict)
    left: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept: Kept | None = None
    complete: bool = False


@dataclass(frozen=True)
class _Case:
    """A proof that runs, as the result that it will have but for its sides."""

    proof: Proof
    result: Result
    source: str
    stock: SideTask
    patched: SideTask | None

    @property
    def tasks(self) -> list[SideTask]:
        return [self.stock, *([self.patched] if self.patched is not None else [])]


Say = Callable[[str], None]


def prove(plan: Plan, request: Request, say: Say) -> list[Result]:
    """Run the proofs of the patches in the plan. `say` is told what has ended."""
    wanted = [decision for id, decision in plan.decisions.items() if not request.ids or id in request.ids]
    if all(decision.action in NOTHING_THERE for decision in wanted):
        return _proved(plan, request, say, None)
    with Process("cpu") as first:  # it imports torch while this process does, for the proofs
        return _proved(plan, request, say, first)


def _proved(plan: Plan, request: Request, say: Say, first: Process | None) -> list[Result]:
    from shim.testing.proof import proofs_of

    cases: dict[str, _Case] = {}
    results: dict[str, Result] = {}
    for id, decision in plan.decisions.items():
        if request.ids and id not in request.ids:
            continue
        entry = plan.matrix.patches[id]
        several = len(proofs_of(entry.module)) > 1
        every = request.trial is not None and id in request.trial
        for proof, result in _proofs(decision, entry, bool(request.ids), every):
            label = f"{id}/{proof.name}" if several and proof is not None else id
            result = replace(result, label=label, left=tuple(decision.dropped))
            results[label] = result
            if proof is None:
                continue
            impossible, device, world = _place(proof, request)
            impossible = impossible or _missing(proof, plan, request)
            if impossible:
                results[label] = replace(result, verdict="cannot run", reason=impossible)
                continue
            results[label] = replace(result, device=device)
            asked = request if request.trial is not None else _in_part(plan, (id, *proof.beside), request)
            cases[label] = _case(label, entry.module, proof, results[label], device, world, asked)
    answers = _run(cases.values(), request, say, first=first)
    return [_judged(cases[label], answers) if label in cases else result for label, result in results.items()]


def _in_part(plan: Plan, ids: Iterable[str], request: Request) -> Request:
    """The request, in which those of the patches that apply in part do without the same bodies as in shim.apply()."""
    part = {id: plan.decisions[id] for id in ids if plan.decisions[id].wanted and plan.decisions[id].dropped}
    if not part:
        return request
    trial = {id: decision.variant or "" for id, decision in part.items()}
    return replace(request, trial=trial, left={id: tuple(decision.dropped) for id, decision in part.items()})


def prove_model(model: str, request: Request, say: Say) -> tuple[list[Result], list[dict[str, str]]]:
    """Run the generic proofs on the model that `my_module:build` builds: with the trainer's patches, and with shim.

    The second part of the answer is shim's verdict on the trainer's overrides in that model.
    """
    from shim.testing.generic import generic_proofs

    found = generic_proofs(lambda: None)  # for their names and texts; the model is built in separate processes
    if unknown := set(request.ids) - {proof.name for proof in found}:
        names = ", ".join(proof.name for proof in found)
        raise OptionError(f"no generic proof is called {', '.join(sorted(unknown))}; there are {names}")
    look = SideTask("overrides", MODEL + model, OVERRIDES, (), request.device)
    seen = _run([], request, say, [look])[look.key]
    if seen["state"] == UNUSABLE:
        raise OptionError(seen["text"])
    overrides = seen.get("overrides")
    if overrides is None:
        overrides = [{"patch": "", "target": "", "state": "unknown", "reason": seen["text"]}]
    return prove_generic(model, request, say), overrides


def prove_generic(model: str, request: Request, say: Say) -> list[Result]:
    """Run the generic proofs that the request names, or all, on the model that `my_module:build` builds."""
    from shim.testing.generic import generic_proofs

    found = generic_proofs(lambda: None)
    cases: dict[str, _Case] = {}
    results: dict[str, Result] = {}
    for proof in found:
        if request.ids and proof.name not in request.ids:
            continue
        impossible, device, world = _place(proof, request)
        results[proof.name] = result = replace(
            _blank(proof), label=proof.name, device=device, verdict="cannot run", reason=impossible
        )
        if not impossible:
            cases[proof.name] = _case(proof.name, MODEL + model, proof, result, device, world, request)
    answers = _run(cases.values(), request, say)
    return [_judged(cases[name], answers) if name in cases else result for name, result in results.items()]


def _blank(proof: Proof) -> Result:
    function = inspect.unwrap(proof.function)
    try:
        source = inspect.getsource(function)
    except OSError:  # an installation without sources
        source = ""
    text = inspect.cleandoc(function.__doc__ or "")
    blank = Result("", proof.name, "", "", proof.defect, "cpu", "", "", bound=proof.bound, curve=proof.curve)
    return replace(blank, reproduction=text, source=source)


def _proofs(decision: Decision, entry: PatchEntry, asked: bool, every: bool) -> Iterator[tuple[Proof | None, Result]]:
    """The proofs of a patch that say something here, or a result that says why there is none.

    every: also those about other variants.
    """
    from shim.testing.proof import proofs_of

    base = Result(decision.id, "", decision.id, entry.kind, "", "", "cannot run", "", decision.action, decision.variant)
    if decision.action in NOTHING_THERE:
        if asked:
            yield None, replace(base, reason=f"the patch is {decision.action} here: {decision.reason}")
        return
    found = proofs_of(entry.module)
    about = [
        proof
        for proof in found
        if every or decision.action in RIGHT or not proof.variants or decision.variant in proof.variants
    ]
    if not about:
        yield None, replace(base, reason="it has no proof" if not found else "none of its proofs is about this variant")
    for proof in about:
        blank = replace(_blank(proof), patch=decision.id, kind=entry.kind)
        yield proof, replace(blank, action=decision.action, variant=decision.variant)


def _place(proof: Proof, request: Request) -> tuple[str, str, int]:
    """(why it cannot run, or "", device, ranks)."""
    # A process that has begun to use a GPU cannot fork ranks.
    device = request.device if request.device in proof.devices and proof.ranks == 1 else "cpu"
    world = proof.ranks if request.ranks is None or proof.ranks == 1 else request.ranks
    if device not in proof.devices:
        return "it needs a GPU: shim prove --device cuda", device, world
    if world < proof.ranks:
        return f"it needs {proof.ranks} ranks, and --ranks {world} allows {world}", device, world
    return "", device, world


def _beside(proof: Proof, request: Request) -> tuple[str, ...]:
    """The patches that both sides need. A tree that does not need one, or cannot have it, does without."""
    return tuple(id for id in proof.beside if (request.trial or {}).get(id) != "")


def _missing(proof: Proof, plan: Plan, request: Request) -> str:
    """Why the installed releases cannot show the defect, or ""."""
    if proof.te and TE not in plan.environment.installed:
        return f"it needs {TE}"
    absent = [id for id in _beside(proof, request) if plan.decisions[id].action not in ("apply", *RIGHT)]
    return f"it needs {absent[0]} beside it, which is {plan.decisions[absent[0]].action}" if absent else ""


def _case(label: str, source: str, proof: Proof, result: Result, device: str, world: int, request: Request) -> _Case:
    beside = _beside(proof, request)
    watched = request.watch.get(result.patch, ())
    tried = request.trial if beside else None
    left = request.left if tried else {}
    key, needed = f"{label} stock", beside or None
    stock = SideTask(key, source, proof.name, needed, device, world, proof.te, None, tried, watched, left)
    applied = () if request.together or not result.patch else (result.patch, *beside)
    options = {result.patch: dict(proof.options)} if proof.options else None
    patched = replace(
        stock, key=f"{label} with shim", ids=applied, options=options, trial=request.trial, left=request.left
    )
    wanted = result.action == "apply" or not result.patch
    return _Case(proof, result, source, stock, patched if wanted else None)


def _judged(case: _Case, answers: Mapping[str, Mapping[str, Any]]) -> Result:
    sides = [outcome_of(answers[task.key], case.proof.defect, case.proof.crashes) for task in case.tasks]
    stock, patched = sides[0], sides[1] if len(sides) > 1 else None
    if case.result.patch:
        verdict, reason = verdict_of(case.result.action, stock, patched)
    else:
        assert patched is not None
        verdict, reason = generic_verdict(stock, patched)
    reason = "; ".join(filter(None, (reason, case.result.part)))
    return replace(case.result, verdict=verdict, reason=reason, stock=stock, patched=patched)


# ---- workers


def _run(
    cases: Iterable[_Case],
    request: Request,
    say: Say,
    more: Iterable[SideTask] = (),
    first: Process | None = None,
) -> dict[str, dict[str, Any]]:
    """The answers by the keys of the tasks. Each worker shares what it has imported among its tasks.

    more: further tasks, about a user's model. first: a process that was started before, and ends with its work.
    """
    groups: dict[tuple[bool, bool, str], list[SideTask]] = {}
    answers: dict[str, dict[str, Any]] = {}
    for case in cases:
        # A process that uses a GPU cannot be forked, so nothing is shared there.
        alone = case.stock.device != "cpu" or (case.source.startswith(MODEL) and case.source != MODEL + SMALL_GPT)
        for task in case.tasks:
            earlier = None if request.kept is None else request.kept.answer(task)
            if earlier is not None:
                answers[task.key] = {**earlier, "key": task.key}
            else:
                groups.setdefault((not alone, case.proof.te, task.device), []).append(task)
    for task in more:
        groups.setdefault((False, False, task.device), []).append(task)
    total = len(answers) + sum(map(len, groups.values()))
    with contextlib.ExitStack() as opened:
        waiting = []
        for (preload, te, device), tasks in groups.items():
            # All import at once. Only then one after the other runs its sides, `jobs` of them at once.
            if first is not None and first.device == device:
                process, first = first, None
            else:
                process = opened.enter_context(Process(device))
            process.give(Work(tuple(tasks), preload, te, device, request.jobs, request.timeout))
            waiting.append((process, {task.key: task for task in tasks}))
        for process, asked in waiting:
            say(f"{_bar(len(answers), total)} importing")
            for answer in process.answers():
                if answer["state"] == ENDED and request.complete:
                    raise NotMetError(f"no proof can run here: {answer['text']}")
                answers[answer["key"]] = answer
                if request.kept is not None:
                    request.kept.keep(asked[answer["key"]], answer)
                say(f"{_bar(len(answers), total)} {answer['key']}: {answer['text']}")
    return answers


def _bar(done: int, total: int) -> str:
    width = 20
    filled = width * done // total if total else width
    return f"[{'#' * filled}{'.' * (width - filled)}] {done} of {total} sides"

"""Decisions of the proofs about a tree: which patches fix it, which it does not need, and which are left out.

The proofs of each patch run on stock and with the patch, on a commit that shim knows as well. A patch whose bodies are
all those of a release needs no decision, unless its proofs fail: the tree may differ in code that the patch neither
binds nor reads. All accepted patches then run once more together, with the generic proofs on a small model: a patch
that is right alone may be wrong beside the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shim._matrix.model import RIGHT as RIGHT_STATES
from shim._matrix.model import UPSTREAM, Variant
from shim._planning.bodies import GONE, Bodies
from shim._planning.evidence import CANNOT_RUN, FIXED, LACKING, NOT_FIXED, RIGHT
from shim._planning.plan import Plan
from shim._proving.reached import Spot, spots_of
from shim._proving.results import Outcome, Result, past
from shim._proving.run import SMALL_GPT, Request, Say, prove, prove_generic

__all__ = ["Decided", "Judgement", "decide", "undecided"]

TRIES = 3  # variants of a patch, the likeliest first
NAMED = 4  # measurements in one sentence


@dataclass(frozen=True)
class Judgement:
    """The judgement about one patch.

    proofs: for each proof the measurement on stock and with the patch, in words.
    dropped: targets without which the patch is accepted: no proof runs their bodies, and it can do without them.
    """

    id: str
    verdict: str
    variant: str | None
    shown: str
    proofs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def refused(self, shown: str) -> Judgement:
        """The judgement about a patch that was accepted, and is wrong beside others."""
        return replace(self, verdict=NOT_FIXED, shown=shown, dropped=())


@dataclass(frozen=True)
class Decided:
    """All judgements about a tree.

    generic: the generic proofs without and with all that was accepted, in words.
    told: contradictions to the matrix, about patches whose bodies are known.
    """

    judgements: tuple[Judgement, ...]
    generic: Mapping[str, Mapping[str, str]]
    told: tuple[str, ...]


@dataclass(frozen=True)
class Watched:
    """The bodies of a patch of which a run of its proofs is to say whether they run, by target.

    changed: those that must run before the patch counts as a fix: no release has them with the tried variant.
    doubtful: those that must run before the tree counts as right: no release that is right has them.
    """

    spots: tuple[Spot, ...] = ()
    changed: frozenset[str] = frozenset()
    doubtful: frozenset[str] = frozenset()


def undecided(plan: Plan) -> list[str]:
    """The patches of which not all bodies were seen in a release."""
    found = []
    for id, decision in ((id, d.without_conflict or d) for id, d in plan.decisions.items()):
        if decision.action in ("excluded", "not-installed", "out-of-range"):
            continue
        variant = UPSTREAM if decision.action in RIGHT_STATES else decision.variant or ""
        if decision.dropped or not _bodies(plan, id).all_known(variant, decision.fingerprints):
            found.append(id)
    return found


def _bodies(plan: Plan, id: str) -> Bodies:
    return Bodies(plan.matrix.patches[id], plan.environment, plan.matrix.released)


def decide(plan: Plan, request: Request, say: Say) -> Decided:
    """Run the proofs and judge. `request` gives the number of jobs, the time limit, and earlier answers.

    If it names patches, only these are judged: the others are applied as they are planned, and their proofs do not run.
    """
    ids = [id for id in undecided(plan) if not request.ids or id in request.ids]
    likely = {id: [variant.name for variant in _bodies(plan, id).likely()[:TRIES]] for id in ids}
    known = () if request.ids else tuple(id for id, d in plan.decisions.items() if d.wanted and id not in ids)
    judged: dict[str, Judgement] = {}
    told: tuple[str, ...] = ()
    for number in range(TRIES):
        variants = {id: names[number] for id, names in likely.items() if len(names) > number and _open(judged.get(id))}
        # The first round also takes patches without a fitting variant, and those whose bodies are known.
        tried, beside = (ids, known) if number == 0 else (list(variants), ())
        if not tried and not beside:
            break
        trial = {**dict.fromkeys(likely, ""), **_accepted(judged), **variants}
        results, watched = _round(plan, tried, trial, _left(judged), beside, request, say)
        for id in tried:
            seen = _judged(plan, id, variants.get(id), _of(id, results), watched[id])
            if id not in judged or seen.verdict == FIXED:
                judged[id] = seen
        told += _against_the_matrix(plan, beside, results, request, say)
        for id in beside:
            given = plan.decisions[id].variant or ""
            seen = _judged(plan, id, given, _of(id, results), Watched())
            if seen.verdict == NOT_FIXED:  # right where its bodies come from, and not here
                judged[id] = seen
                others = [variant.name for variant in _bodies(plan, id).likely() if variant.name != given]
                likely[id] = [given, *others][:TRIES]
    judged = _together(plan, judged, request, say)
    judged, generic = _generic(plan, judged, request, say)
    return Decided(tuple(_with_bodies(plan, judged[id]) for id in likely), generic, told)


def _open(judgement: Judgement | None) -> bool:
    """Whether another variant may do better."""
    return judgement is None or judgement.verdict == NOT_FIXED


# ---- one patch


def _round(
    plan: Plan,
    ids: Sequence[str],
    trial: Mapping[str, str],
    left: Mapping[str, tuple[str, ...]],
    known: Sequence[str],
    request: Request,
    say: Say,
) -> tuple[list[Result], dict[str, Watched]]:
    """The results of these patches with the variants of `trial`, and of the known ones; and what was watched.

    left: targets without which patches beside them are applied.
    """
    watched = {id: _watched(plan, id, trial[id]) for id in ids}
    spots = {id: each.spots for id, each in watched.items()}
    asked = replace(request, ids=(*ids, *known), trial=trial, left=left, watch=spots)
    return prove(_as_tried(plan, {id: name for id, name in trial.items() if name}), asked, say), watched


def _of(id: str, results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result.patch == id]


def _as_tried(plan: Plan, variants: Mapping[str, str]) -> Plan:
    """The plan in which these variants are applied."""
    decisions = dict(plan.decisions)
    for id, variant in variants.items():
        wiring = plan.matrix.patches[id].variants[variant]
        decisions[id] = replace(decisions[id], action="apply", wiring=wiring)
    return replace(plan, decisions=decisions)


def _watched(plan: Plan, id: str, variant: str) -> Watched:
    """What is watched if this variant is tried; "" if none fits the tree."""
    changed, doubtful = _unknown_bodies(plan, id, variant), _doubtful_bodies(plan, id, variant)
    spots = spots_of(plan.environment.sources, {**changed, **doubtful})
    called = {target for target, *_ in spots}
    return Watched(spots, frozenset(changed.keys() & called), frozenset(doubtful.keys() & called))


def _unknown_bodies(plan: Plan, id: str, variant: str) -> dict[str, str]:
    """The bodies of a variant ("": of none) that only proofs can speak for, each with the name that defines it."""
    if not variant:
        return {}
    bodies, wiring = _bodies(plan, id), plan.matrix.patches[id].variants[variant]
    return _unseen(bodies, wiring, bodies.unknown(variant, bodies.of(wiring)))


def _doubtful_bodies(plan: Plan, id: str, variant: str) -> dict[str, str]:
    """The bodies of a variant ("": of all) that no release has that has fixed the defect, as `_unknown_bodies`."""
    bodies, entry = _bodies(plan, id), plan.matrix.patches[id]
    right = {
        (target, body)
        for release, pin in bodies.pins
        if plan.matrix.wanted(id, release) == UPSTREAM
        for target, body in pin.fingerprints.items()
    }
    found: dict[str, str] = {}
    for wiring in [entry.variants[variant]] if variant else entry.variants.values():
        doubtful = [target for target in wiring.bodies if (target, bodies.found_in(wiring, target)) not in right]
        found |= _unseen(bodies, wiring, doubtful)
    return found


def _unseen(bodies: Bodies, wiring: Variant, targets: Iterable[str]) -> dict[str, str]:
    """Those of the bodies that are in the tree, and are bound by the variant or in no release."""
    # What the patch only relies on has not changed if it is in a release, whatever variant the release gets.
    seen = {(target, body) for _, pin in bodies.pins for target, body in pin.fingerprints.items()}
    found = {target: bodies.found_in(wiring, target) for target in targets}
    return {
        target: wiring.inherits(target) or target
        for target, body in found.items()
        if body != GONE and (target in wiring.targets or (target, body) not in seen)
    }


def _judged(plan: Plan, id: str, variant: str | None, results: Sequence[Result], watched: Watched) -> Judgement:
    """The judgement of a patch from all its proofs. watched: the bodies that have to run.

    That it fixes the tree is said by the proofs about this variant; that the tree is right without it, by all.
    """
    proofs = {result.proof: _sides(result) for result in results if result.stock is not None}
    ran = [result for result in results if _ran(result)]
    own = _about(plan, id, variant, ran)
    lacking = [result for result in results if result.stock is not None and result.stock.lacks]
    if results and len(lacking) == len(results):
        texts = dict.fromkeys(result.stock.text for result in lacking if result.stock is not None)
        return Judgement(id, LACKING, None, _listed(list(texts)), proofs)
    if not ran:
        why = next((result.reason for result in results if result.reason), "none of its proofs can run here")
        return Judgement(id, CANNOT_RUN, variant, why, proofs)
    if not any(_is_wrong(result.stock) for result in ran):
        left = [result for result in results if not _ran(result) and result not in lacking]
        if left:
            why = f"{_stocks(ran)}, but of {left[0].proof}: {_why_not(left[0])}"
            return Judgement(id, CANNOT_RUN, variant, why, proofs)
        missed = _missed(watched.doubtful, ran)
        if missed:
            why = f"{_stocks(ran)}, but its proofs do not run {_names(missed)}"
            return Judgement(id, CANNOT_RUN, variant, why, proofs)
        return Judgement(id, RIGHT, None, _stocks(ran), proofs)
    if variant is None:
        why = "no variant of the patch has all its targets here"
        return Judgement(id, NOT_FIXED, None, f"{_stocks(ran)}, and {why}", proofs)
    bad = [result for result in own if result.patched is None or result.patched.state != "right"]
    if bad and all(result.gets_further for result in bad):
        return Judgement(id, CANNOT_RUN, variant, _listed([_past(result) for result in bad]), proofs)
    if bad:
        return Judgement(id, NOT_FIXED, variant, _measured(bad), proofs)
    fixed = [result for result in own if _is_wrong(result.stock)]
    if not fixed:
        others = [result for result in ran if _is_wrong(result.stock)]
        return Judgement(id, NOT_FIXED, variant, _measured(others), proofs)
    missed = sorted(watched.changed - set().union(*(result.reached for result in own)))
    wiring = plan.matrix.patches[id].variants[variant]
    if set(missed) - wiring.skippable.keys() or set(missed) >= set(wiring.targets):
        return Judgement(id, CANNOT_RUN, variant, f"its proofs do not run {_names(missed)}", proofs)
    without = f"; without {_names(missed)}, which its proofs do not run" if missed else ""
    return Judgement(id, FIXED, variant, _measured(fixed) + without, proofs, dropped=tuple(missed))


def _about(plan: Plan, id: str, variant: str | None, results: Iterable[Result]) -> list[Result]:
    """Those of the results of a patch whose proofs are about this variant."""
    from shim.testing.proof import proofs_of  # imports torch

    about = {proof.name: proof.variants for proof in proofs_of(plan.matrix.patches[id].module)}
    return [result for result in results if not about[result.proof] or variant in about[result.proof]]


def _missed(bodies: Collection[str], results: Iterable[Result]) -> list[str]:
    """The bodies that none of these proofs has run on stock."""
    ran = {target for result in results if result.stock is not None for target in result.stock.reached}
    return sorted(set(bodies) - ran)


def _past(result: Result) -> str:
    assert result.stock is not None and result.patched is not None
    return past(result.stock, result.patched)


def _names(targets: Iterable[str]) -> str:
    return ", ".join(target.partition(":")[2] for target in targets)


def _why_not(result: Result) -> str:
    """Why a proof says nothing here."""
    stock = result.stock
    return result.reason or ("" if stock is None else stock.text)


def _ran(result: Result) -> bool:
    """Whether the proof says something. One that breaks on stock alone says that the patch fixes what breaks."""
    if any(side.state == "cannot run" for side in result.sides):
        return False
    return result.stock is not None and (
        result.stock.state != "broken" or (result.patched is not None and result.patched.state == "right")
    )


def _is_wrong(side: Outcome | None) -> bool:
    return side is not None and side.state in ("wrong", "broken")


def _sides(result: Result) -> dict[str, str]:
    said = {"stock": "" if result.stock is None else result.stock.text}
    return said if result.patched is None else {**said, "with_shim": result.patched.text}


def _stocks(results: Sequence[Result]) -> str:
    return _listed([result.stock.text for result in results if result.stock is not None])


def _measured(results: Sequence[Result]) -> str:
    return _listed(
        [
            f"{result.stock.text} -> {result.patched.text}"
            for result in results
            if result.stock is not None and result.patched is not None
        ]
    )


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more


# ---- all together


def _accepted(judged: Mapping[str, Judgement]) -> dict[str, str]:
    return {id: j.variant for id, j in judged.items() if j.verdict == FIXED and j.variant is not None}


def _left(judged: Mapping[str, Judgement]) -> dict[str, tuple[str, ...]]:
    """The targets without which patches are accepted."""
    return {id: j.dropped for id, j in judged.items() if j.dropped}


def _trial(judged: Mapping[str, Judgement], without: str = "") -> dict[str, str]:
    """What the process applies beside all patches whose bodies are known. What was not shown is decided as ever."""
    left_out = {id: "" for id, j in judged.items() if j.verdict in (NOT_FIXED, RIGHT, LACKING)}
    return {**_accepted(judged), **left_out, **({without: ""} if without else {})}


def _together(plan: Plan, judged: dict[str, Judgement], request: Request, say: Say) -> dict[str, Judgement]:
    """The judgements, after the proofs of what was accepted have run with all patches applied."""
    accepted = _accepted(judged)
    if not accepted:
        return judged
    asked = replace(request, ids=tuple(accepted), together=True, trial=_trial(judged), left=_left(judged))
    found = dict(judged)
    results = prove(_as_tried(plan, accepted), asked, say)
    for id, variant in accepted.items():
        ran = [result for result in _of(id, results) if result.stock is not None and _ran(result)]
        for result in _about(plan, id, variant, ran):
            if result.patched is None or result.patched.state != "right":
                found[id] = judged[id].refused(f"beside all other patches {_measured([result])}")
    return found


def _generic(
    plan: Plan, judged: dict[str, Judgement], request: Request, say: Say
) -> tuple[dict[str, Judgement], dict[str, dict[str, str]]]:
    """The judgements, after the generic proofs on a small model; and what these say.

    If one is right on stock and not with the patches, what was accepted is left out one by one to find which does it.
    """
    if "megatron-core" not in plan.environment.installed or not _accepted(judged):
        return judged, {}
    asked = replace(request, ids=(), trial=_trial(judged), left=_left(judged))
    results = prove_generic(SMALL_GPT, asked, say)
    for worse in [result for result in results if _worse(result)]:
        for id in _accepted(judged):
            again = replace(asked, ids=(worse.proof,), trial=_trial(judged, without=id))
            [result] = prove_generic(SMALL_GPT, again, say)
            if result.patched is not None and result.patched.state == "right":
                judged = {**judged, id: judged[id].refused(f"with it {worse.proof}: {_measured([worse])}")}
    return judged, {result.proof: _sides(result) for result in results}


def _worse(result: Result) -> bool:
    stock, patched = result.stock, result.patched
    return stock is not None and patched is not None and stock.state == "right" and patched.state != "right"


def _against_the_matrix(
    plan: Plan, known: Iterable[str], results: Sequence[Result], request: Request, say: Say
) -> tuple[str, ...]:
    """Patches whose bodies are known and that are to be applied, on whose stock no proof shows the defect.

    Few are, so only their proofs run again under a tracer, which tells whether they run the bodies at all.
    """
    ran = {id: [result for result in _of(id, results) if _ran(result)] for id in known}
    right = [id for id, own in ran.items() if own and not any(_is_wrong(result.stock) for result in own)]
    if not right:
        return ()
    watched = {id: _watched(plan, id, plan.decisions[id].variant or "") for id in right}
    asked = replace(request, ids=tuple(right), watch={id: each.spots for id, each in watched.items()})
    again = prove(plan, asked, say)
    return tuple(
        f"{id}: by its bodies this tree needs it, and its proofs are right on stock ({_stocks(ran[id])})"
        for id in right
        if not _missed(watched[id].doubtful, _of(id, again))
    )


def _with_bodies(plan: Plan, judgement: Judgement) -> Judgement:
    """The judgement with the bodies that it is about."""
    entry, bodies = plan.matrix.patches[judgement.id], _bodies(plan, judgement.id)
    here = bodies.here() if judgement.variant is None else bodies.of(entry.variants[judgement.variant])
    return replace(judgement, fingerprints=here)

"""Step 3, plan: one decision with one reason per patch, a pure function of environment, matrix and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import field
from typing import Any

from shim._matrix.concerns import NO, Run, run_of
from shim._matrix.model import Matrix, PatchEntry
from shim._planning.decision import Decision, Losses, LostFeature
from shim._planning.evidence import Proved, evidence_for
from shim._planning.match import Match, match
from shim._planning.options import ROUNDING, Options
from shim._record import computed_once, record, replace
from shim._releases.detect import Environment

__all__ = ["Decision", "Plan", "is_off_unless_rounding", "make_plan"]


@record
class Plan:
    """Decisions by patch id, the environment they are for, and a digest that ranks can compare.

    asked_by: the call that the plan was made for, with its file and line, for messages.
    """

    decisions: Mapping[str, Decision]
    environment: Environment
    options: Options
    matrix: Matrix = field(compare=False, repr=False)
    losses: Losses | None = field(default=None, compare=False, repr=False)
    asked_by: str = field(default="an earlier call", compare=False, repr=False)

    def __getitem__(self, id: str) -> Decision:
        return self.decisions[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    @computed_once
    def digest(self) -> str:
        """16 hexadecimal digits over `identity`."""
        from shim._planning.digest import digest_of  # here, because apply() asks for none

        return digest_of(self.identity)

    @computed_once
    def identity(self) -> dict[str, Any]:
        """The identity of the plan as plain data, see `identity_of`."""
        from shim._planning.digest import identity_of

        return identity_of(self.decisions, self.matrix, self.environment, self.options.packages)

    @property
    def numbers(self) -> str:
        """In a few words, whether the plan changes numbers that stock has right."""
        wanted = [decision for decision in self.decisions.values() if decision.wanted]
        of_words = {
            "rounding differs from stock's, as asked": [
                d.id for d in wanted if d.options.get(ROUNDING) or is_off_unless_rounding(self.matrix.patches[d.id])
            ],
            "whether numbers change is not known of patches on unknown bodies, as asked": [
                d.id for d in wanted if d.unseen
            ],
        }
        said = [f"{words}: {', '.join(ids)}" for words, ids in of_words.items() if ids]
        return "; ".join(said) or "a run that meets no defect has stock's bits"

    @computed_once
    def lost_features(self) -> tuple[LostFeature, ...]:
        """The lost features of the installed pair, fixed or not. Empty if `pair_is_known` is not true.

        Looked up by version on first use.
        """
        found = None if self.losses is None else self.losses.lost_features(self.environment, self.decisions)
        return found or ()

    @computed_once
    def wanted(self) -> tuple[tuple[Decision, frozenset[str]], ...]:
        """The patches to apply, each with the modules of which one has to be imported before it is loaded."""
        wanted = (decision for decision in self.decisions.values() if decision.wanted)
        return tuple((d, d.modules.union(self.matrix.patches[d.id].before)) for d in wanted)

    @computed_once
    def unhindered(self) -> Mapping[str, Decision]:
        """The decisions as they were before conflicts were found."""
        return {id: decision.without_conflict or decision for id, decision in self.decisions.items()}

    @computed_once
    def _contenders(self) -> tuple[Decision, ...]:
        """The patches to apply if nothing foreign is in their way."""
        return tuple(decision for decision in self.unhindered.values() if decision.wanted)

    @computed_once
    def targets_in(self) -> Mapping[str, Set[str]]:
        """The targets of the contenders, by module."""
        found: dict[str, set[str]] = {}
        for decision in self._contenders:
            for target, module in decision.placed:
                found.setdefault(module, set()).add(target)
        return found

    def concerned(self, targets: set[str]) -> list[Decision]:
        """The contenders that bind one of these targets, and those that have ways to a body, in their order."""
        return [d for d in self._contenders if d.reached_by or not targets.isdisjoint(d.targets)]

    @computed_once
    def awaited(self) -> frozenset[str]:
        """The modules of all targets, and those before whose code a patch begins something."""
        return frozenset().union(*(modules for _, modules in self.wanted), *(d.modules for d in self._contenders))

    @property
    def pair_is_known(self) -> bool | None:
        """Whether the losses of this pair of releases were measured. None if one of them is not installed."""
        return None if self.losses is None else self.losses.pair_is_known(self.environment)

    @property
    def wrong_pairs(self) -> tuple[tuple[str, str], ...]:
        """(patch, defect) for each defect of the installed releases together that a patch of this plan fixes."""
        return tuple(
            (id, pair.note)
            for id, decision in self.decisions.items()
            for pair in (self.matrix.patches[id].pairs if decision.wanted else ())
            if pair.holds(self.environment.versions)
        )

    def to_dict(self, run: Run | None = None) -> dict[str, Any]:
        """Plain data. With `run`, whether each patch concerns it: "yes", "no" or "unknown"."""
        return {
            "digest": self.digest,
            "environment": self.environment.to_dict(),
            "patches": {
                id: {**decision.to_dict(), **_described(self.matrix.patches[id], run)}
                for id, decision in self.decisions.items()
            },
            "wrong_pairs": [{"patch": id, "what": what} for id, what in self.wrong_pairs],
            "pair_is_known": self.pair_is_known,
            "lost_features": [feature.to_dict() for feature in self.lost_features],
        }

    def text(self, verbose: bool = False, run: Run | None = None) -> str:
        """The plan for people. `verbose` adds the reason of every decision, `run` tells what concerns it."""
        from shim._planning.texts import plan_text  # here, because apply() writes no text

        return plan_text(self, verbose, run)

    def __str__(self) -> str:
        return self.text()


def _described(entry: PatchEntry, run: Run | None) -> dict[str, str]:
    concerns = {} if run is None else {"concerns": run.concern_of(entry.concerns)}
    return {"summary": entry.summary, "symptom": entry.symptom, "changes": entry.changes, **concerns}


# Stock's bits are the default: what a user compares with, and what a maintainer can review.
ROUNDS = "it changes rounding where stock is right, and that was not asked for (rounding=True)"


def is_off_unless_rounding(entry: PatchEntry) -> bool:
    """Whether a patch does nothing but gain by a change of rounding where stock is right."""
    # One that has an option for it stays, and is told whether it may: see Options.for_patch.
    rounds = "rounding" in (entry.changes, *entry.effects) and ROUNDING not in (entry.options or {})
    return rounds and entry.kind == "performance"


def _excluded(entry: PatchEntry, options: Options) -> str:
    if options.disabled:
        return "MEGATRON_SHIM_DISABLE is set"
    if entry.id in options.exclude:
        return "excluded by argument or MEGATRON_SHIM_EXCLUDE"
    if options.only is not None and entry.id not in options.only:
        return "not among the patches asked for with only"
    if options.kinds is not None and entry.kind not in options.kinds:
        return f"its kind, {entry.kind}, is not among the kinds asked for"
    return ""


PROVE = "shim pin --prove --lock FILE"


def _drift_remedy(entry: PatchEntry, environment: Environment, matrix: Matrix, found: Match, proved: bool) -> str:
    """The remedy for a drift, by its cause (see Match.cause). proved: whether the proofs have run here."""
    installed = environment.installed[entry.distribution]
    supported = matrix.supported.get(entry.distribution, ())
    release = f"{entry.distribution} {installed.raw or ''}".rstrip()
    if found.cause == "bytecode":
        return f"install {release} with its sources (.py files): shim compares them before it patches"
    if found.cause == "unreadable":
        return f"let this process read the files of {release}"
    if found.cause == "damaged":
        newer = f"a newer Python than {environment.python}"
        return f"reinstall {release}; if the file is not damaged, it needs {newer}"
    pinned = {release for release, _ in matrix.known(entry.id)}
    if found.cause == "unpinned" or (installed.raw in supported and installed.raw not in pinned):
        command = "make pins" if matrix.shipped else f"shim pin --releases --matrix {matrix.path}"
        return f"run {command}"
    if found.cause == "disproved":
        return f"update megatron-shim, or exclude the patch; shim prove {entry.id} shows what is wrong"
    if proved:
        anyway = ", or apply it anyway with on_drift='apply'" if found.signatures_fit else ""
        return f"update megatron-shim, or exclude the patch{anyway}; shim prove {entry.id} shows what its proofs say"
    # One remedy for all, so that they share a warning.
    if installed.raw in supported:
        other = f"reinstall {release}, whose code this is not"
    else:
        releases = f" ({supported[0]} to {supported[-1]})" if supported else ""
        other = f"install a supported release of {entry.distribution}{releases}"
    return f"let the proofs decide, in some minutes: {PROVE}; or {other}"


def _not_concerned(entry: PatchEntry, options: Options, run: Run | None) -> str:
    """Why a patch is of no use to the run that `concerns` names; "" if it is, may be, or is required by its name."""
    if run is None or entry.id in options.require or run.concern_of(entry.concerns) != NO:
        return ""
    missing = dict.fromkeys(word for words in entry.concerns for word in words if not run.facts.get(word))
    return f"it concerns {_alternatives(entry)}, and this run has no {', '.join(missing)}"


def _alternatives(entry: PatchEntry) -> str:
    return " or ".join("+".join(words) for words in entry.concerns)


def _decide(
    entry: PatchEntry,
    environment: Environment,
    options: Options,
    matrix: Matrix,
    proved: Proved | None,
    run: Run | None = None,
) -> Decision:
    excluded = _excluded(entry, options)
    if excluded:
        return Decision(entry.id, entry.kind, "excluded", excluded)
    if why := _not_concerned(entry, options, run):
        return Decision(entry.id, entry.kind, "not-concerned", why)
    found = match(entry, environment, matrix, proved)
    action, reason, remedy = found.state, found.reason, ""
    if is_off_unless_rounding(entry) and action in ("apply", "drifted") and not options.may_round(entry.id):
        return Decision(entry.id, entry.kind, "excluded", ROUNDS)
    variant, dropped = entry.variants.get(found.variant or ""), found.dropped
    forced = options.on_drift == "apply" and found.signatures_fit and bool(dropped or action == "drifted")
    dropped = {} if forced else dropped
    if dropped:
        remedy = _drift_remedy(entry, environment, matrix, replace(found, cause="changed"), proved is not None)
    if action == "drifted":
        remedy = _drift_remedy(entry, environment, matrix, found, proved is not None)
        if forced:
            action, reason, remedy = "apply", f"applied to a body that is not known, as asked for: {reason}", ""
        elif options.on_drift == "apply":
            causes = {
                "unpinned": "no signature is pinned",
                "unshown": "nothing shows that the patch is needed",
                "disproved": "the patch was seen not to fix this tree",
            }
            why = causes.get(found.cause, "the signature of a target has also changed")
            reason += f"; on_drift='apply' does not help, because {why}"
    return Decision(
        entry.id,
        entry.kind,
        action,
        reason,
        variant.without(dropped) if variant is not None and dropped and action == "apply" else variant,
        {target: body for target, body in found.fingerprints.items() if target not in dropped},
        options.for_patch(entry.id, entry.options or {}),
        remedy,
        dropped=dropped if action == "apply" else {},
        unseen=forced and action == "apply",
    )


def make_plan(environment: Environment, matrix: Matrix, options: Options, losses: Losses | None = None) -> Plan:
    """Decide about every patch of the matrix. Imports nothing, and changes nothing."""
    proved = evidence_for(options.lock_content, environment) if options.trial is None else options.trial
    words, te = options.concerns, "transformer-engine" in environment.installed
    run = None if words is None else run_of(words, te)
    decisions = {
        id: _decide(entry, environment, options, matrix, proved.get(id), run) for id, entry in matrix.patches.items()
    }
    environment.sources.forget_trees()
    return Plan(decisions, environment, options, matrix, losses)

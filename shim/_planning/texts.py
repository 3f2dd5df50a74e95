"""The text of a plan, and of `shim explain`: what a patch is for, and what was decided about it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from typing import TYPE_CHECKING

from shim._errors import SourceError
from shim._matrix.concerns import UNSAID, WORDS, Run
from shim._matrix.model import DISTRIBUTIONS, NOT_NEEDED, UPSTREAM, PatchEntry
from shim._printing.overview import MORE, Row, concern_line, group, grouped, headline
from shim._printing.printable import one_line, printable
from shim._releases.detect import Environment
from shim._releases.sources import Sources

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["effects_of", "explanation", "nothing_installed", "patch_docstring", "plan_text"]

NAMED = 2  # patches of a section, in a plan of everything
MORE_WORDS = 8  # that a plan suggests


def plan_text(plan: Plan, verbose: bool = False, run: Run | None = None) -> str:
    """The text of a plan, with what the releases get wrong together and lose. `verbose` adds all reasons.

    run: what is known of the run that is to be trained; patches that concern it come first.
    """
    matrix, environment = plan.matrix, plan.environment
    rows = [
        Row(
            id,
            group(d.action, d.kind, False),
            d.action,
            matrix.patches[id].summary,
            d.reason,
            d.remedy,
            d.variant if d.wanted else None,
            dict.fromkeys(d.targets, ""),
            others=d.parts_left,
            effects=effects_of(matrix.patches[id]) if d.wanted else (),
            in_part=d.wanted and bool(d.dropped),
            symptom=matrix.patches[id].symptom,
            changes=matrix.patches[id].changes,
            concern=run.concern_of(matrix.patches[id].concerns) if run is not None and d.wanted else "",
            without=matrix.patches[id].without,
            not_known=run.missing_words(matrix.patches[id].concerns) if run is not None else (),
        )
        for id, d in plan.decisions.items()
    ]
    installed = environment.installed.values()
    problems = [f"  ! {i.distribution}: {one_line(problem)}" for i in installed for problem in i.problems]
    missing = nothing_installed(environment)
    lines = [missing] if missing else [headline(rows, "to apply", len(problems))]
    lines += [concern_line(rows, run.words)] if run is not None and not missing else []
    lines += [f"  {note}" for note in (*plan.options.concerns_notes, *(run.notes if run is not None else ()))]
    lines += _with_one_word_more(plan, run) if run is not None and not missing else []
    # Where it lies is asked if something is wrong.
    with_places = verbose or missing or problems or any(row.group == "problem" for row in rows)
    lines += [f"  {i}" for i in installed] if with_places else ["  " + ", ".join(i.release for i in installed)]
    lines += problems
    if missing and not verbose:
        return "\n".join(lines)
    lines += [f"  plan {plan.digest}: {plan.numbers}"]
    # All are named to one who asks for all, or for a run; else a plan fits a screen.
    most = None if verbose or run is not None or plan.options.concerns is not None else NAMED
    words = run.words if run is not None else ""
    sections = list(grouped(rows, "to apply", verbose, words, most, needed=not verbose))
    lines += sections
    if any(line.endswith(MORE) for line in sections):
        lines += ["", "Name what you train to see what hits it: shim plan --for packed,lora,mtp (or --config FILE)."]
    lines += _of_the_pair(plan) if verbose else _count_of_the_pair(plan)
    if plan.pair_is_known is False:
        lines += [
            "",
            "Lost features of this pair of releases were not measured; shim doctor searches its sources.",
        ]
    return "\n".join(lines)


def _of_the_pair(plan: Plan) -> list[str]:
    """What megatron-core and Transformer Engine get wrong together, and what the first does not get from the other."""
    lines = []
    if plan.wrong_pairs:
        lines += ["", "Defects of this megatron-core with this Transformer Engine, which a patch fixes:"]
    lines += [f"  {id:<27} {one_line(what)}" for id, what in plan.wrong_pairs]
    if plan.lost_features:
        lines += ["", "Features that this megatron-core does not get from this Transformer Engine:"]
    return lines + [f"  {feature.verdict:<13} {one_line(feature)}" for feature in plan.lost_features]


def _count_of_the_pair(plan: Plan) -> list[str]:
    """The same as a count, so that a plan fits a screen."""
    verdicts, said = Counter(feature.verdict for feature in plan.lost_features), []
    if plan.wrong_pairs:
        wrong = len(plan.wrong_pairs)
        said.append(f"{wrong} defect{'s' * (wrong > 1)} of the pair")
    if verdicts:
        said.append(f"features lost with this TE: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")
    return ["", f"Beside this Transformer Engine: {'; '.join(said)} (-v)"] if said else []


def _with_one_word_more(plan: Plan, run: Run) -> list[str]:
    """How many patches each further word of --for would add, if the run is named by such words."""
    if not WORDS.keys() <= run.facts.keys():
        return []
    wanted = [plan.matrix.patches[id] for id, decision in plan.decisions.items() if decision.wanted]
    counts = Counter(word for entry in wanted for word in run.words_that_would(entry.concerns) if word not in UNSAID)
    if not counts:
        return []
    words = ", ".join(f"{word} ({n})" for word, n in counts.most_common(MORE_WORDS))
    return [f"  also relevant if you use {words}"]


def effects_of(entry: PatchEntry) -> tuple[str, ...]:
    """The effects of a patch with several, each with its kind; () if `changes` says it all."""
    return tuple(f"{kind}: {what}" for kind, what in (entry.effects or {}).items())


def nothing_installed(environment: Environment) -> str:
    """A sentence and a remedy for a machine without anything to patch. "" if a distribution is installed."""
    if any(name in environment.installed for name in DISTRIBUTIONS):
        return ""
    python = one_line(sys.executable)
    return (
        f"Neither {' nor '.join(DISTRIBUTIONS)} is installed for {python}, so there is nothing to patch. "
        "Remedy: run shim with the Python of the trainer (python -m shim), or put the source tree on PYTHONPATH."
    )


def patch_docstring(entry: PatchEntry) -> str:
    """The header of the patch file. It is read as text, because importing the patch would import torch."""
    try:
        return ast.get_docstring(Sources().tree(entry.module)) or ""
    except SourceError as error:
        return f"(the file of this patch cannot be read: {error})"


_SYMPTOMS = {
    "silent": "wrong values, no error",
    "crash": "an error",
    "hang": "a run that waits for ever",
    "memory": "more memory than the model needs",
    "missing": "a feature or a speed that is not there",
}
_RIGHT = {UPSTREAM: "upstream has fixed it", NOT_NEEDED: "lacks what this patch fixes"}


def explanation(plan: Plan, id: str, verbose: bool = True) -> str:
    """The text, in several paragraphs. Without `verbose`, what a user asks first, and nothing for developers."""
    entry, decision = plan.matrix.patches[id], plan[id]
    lines = [f"{id}: {one_line(entry.summary)}"]
    lines += [f"Without it: {one_line(entry.without)}"] if entry.without else []
    lines += [f"Symptom: {_SYMPTOMS[entry.symptom]}"] if entry.symptom else []
    lines += [f"Concerns: {'; or '.join(map(_in_words, entry.concerns))}"] if entry.concerns else []
    lines += [f"kind: {entry.kind}; changes: {entry.changes}"]
    lines += [f"  {one_line(effect)}" for effect in effects_of(entry)]
    if verbose:
        lines += ["", printable(patch_docstring(entry))]
    lines += ["", f"Here: {decision.action}: {one_line(decision.reason)}"]
    if decision.remedy:
        lines.append(f"Remedy: {one_line(decision.remedy)}")
    lines += [f"  installed: {installed}" for installed in plan.environment.installed.values()]
    lines += _wiring(entry) if verbose else []
    lines += [f"Option {o.name}={o.default!r}: {o.takes}" for o in entry.declared.values()]
    lines += [f"Upstream: {one_line(reference)}" for reference in entry.references]
    lines += [f"Reported in: {one_line(who)}" for who in entry.met_by]
    if verbose and entry.delete_when:  # else the header says it
        lines.append(f"Delete when: {one_line(entry.delete_when)}")
    lines.append(f"Leave it out: MEGATRON_SHIM_EXCLUDE={id}, or shim.apply(exclude=[{id!r}])")
    if Sources().path(f"{entry.module}.proof") is not None:
        lines.append(f"See it on this machine: shim prove {id}")
    if not verbose:
        lines.append(f"How it works, on which releases, and what it binds: shim explain {id} -v")
    return "\n".join(lines)


def _in_words(words: tuple[str, ...]) -> str:
    return " with ".join(WORDS[word] for word in words)


def _wiring(entry: PatchEntry) -> list[str]:
    """The rules and variants: for developers."""
    lines = ["", "Where it applies:"]
    for rule in entry.rules:
        ranges = ", ".join(f"{name} {spec}" for name, spec in rule.ranges.items())
        what = f"variant {rule.variant}" if rule.variant else _RIGHT[rule.right]
        lines.append(f"  {ranges}: {what}" + (f" ({one_line(rule.note)})" if rule.note else ""))
    for variant in entry.variants.values():
        lines.append(f"Variant {variant.name}:")
        for target in variant.targets:
            verb = "adds" if target in variant.may_be_missing else "binds"
            lines.append(f"  {verb} {target}" + (" if its module is imported" if target in variant.optional else ""))
        lines += [f"  relies on {read}" for read in variant.depends_on]
    if entry.before:
        lines.append(f"Acts before the code of {one_line(', '.join(entry.before))} runs")
    return lines

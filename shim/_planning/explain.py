"""The text of `shim explain`: what a patch is for, and what was decided about it."""

from __future__ import annotations

import ast

from shim._errors import SourceError
from shim._matrix.concerns import WORDS
from shim._matrix.model import NOT_NEEDED, UPSTREAM, PatchEntry
from shim._planning.overview import effects_of
from shim._planning.plan import Plan
from shim._printing.printable import one_line, printable
from shim._releases.sources import Sources

__all__ = ["explanation", "patch_docstring"]


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

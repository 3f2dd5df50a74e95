"""The text of a new patch: module, proof, matrix entry and test, with marked places that say what belongs there."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shim._releases.detect import DISTRIBUTIONS
from shim._releases.fingerprint import split_target
from shim.testing.cells import EVERYDAY, EVERYDAY_PAIRS

from .new_patch_proposal import Proposal

__all__ = ["MARK", "description", "entry", "module", "news", "proof", "test"]

MARK = "FILL" + ":"  # in two parts, so that a search for marked places finds none here


def entry(proposal: Proposal, ranges: Mapping[tuple[str, ...], str]) -> str:
    """The entry of version_matrix.yaml."""
    lines = [f"  {proposal.id}:"]
    lines += [f'    {name}: "{ranges[releases]}"' for name, releases in proposal.variants.items()]
    note = f"{MARK} why these releases, which lack a target, need no patch"
    rules = [f'{{{proposal.distribution}: "{ranges[releases]}", note: "{note}"}}' for releases in proposal.without]
    if len(rules) == 1:
        lines.append(f"    not_needed: {rules[0]}")
    elif rules:
        lines += ["    not_needed:", *(f"      - {rule}" for rule in rules)]
    return "\n".join(lines) + "\n"


def description(proposal: Proposal) -> str:
    """The text of patch.yaml."""
    package = DISTRIBUTIONS[proposal.distribution].package
    lines = [
        f'summary: "{MARK} Fixes or Adds, the symptom first, in one line of at most 100 characters"',
        f'without: "{MARK} what goes wrong without it, in one line"',
        f"kind: correctness  # {MARK} keep it, or compat, performance, feature; then delete this comment",
        f"changes: values  # {MARK} keep it, or rounding, nothing (docs/matrix.md); then delete this comment",
        f"symptom: silent  # {MARK} keep it, or crash, hang, memory, missing; then delete this comment",
        f"concerns: [any]  # {MARK} the runs, such as moe+padding-mask (docs/matrix.md); then delete this comment",
        "variants:",
    ]
    for name in proposal.variants:
        lines += [f"  {name}:", "    targets:"]
        lines += [f"      - {target.removeprefix(package)}" for target in proposal.targets]
        lines.append(f"    # {MARK} list under `reads:` what else the patch relies on; then delete this comment")
    lines += [
        f'references: ["{MARK} the pull request or issue upstream, and whether it is open"]',
        f'met_by: ["{MARK} who has met it or carries a workaround, such as verl issue 1; without any, no key"]',
        "per_model:",
        f'  own: "{MARK} what the patch reads of the call, or of the config of the module"',
        f'  process: "{MARK} what it reads of the process, such as a variable; without any, no key"',
    ]
    return "\n".join(lines) + "\n"


def news(proposal: Proposal) -> str:
    """The fragment of changes/."""
    having = [release for releases in proposal.variants.values() for release in releases]
    releases = having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"
    what = f"Patch `{proposal.id}` for {proposal.distribution} {releases}"
    return f"{what}: {MARK} what goes right now, the symptom first\n"


FUNCTION = """\
def {factory}(original: Function) -> Function:
    @functools.wraps(original)
    def {name}(*args: Any, **kwargs: Any) -> Any:
        # {mark} change what goes in or what comes out, and delete this comment (docs/patch-modules.md)
        return original(*args, **kwargs)

    return {name}
"""

OTHER = """\
def {factory}(original: Any) -> Any:
    # {mark} return what takes the place of this {kind}; make it anew, and leave the original as it is.
    return original
"""

MODULE = '''\
"""{mark} what this patch is about, in one line.

What is wrong: {mark} what goes wrong, who sees it, since which release, and why.

What the patch does: {mark} the smallest change that fixes it, and what it leaves alone.

Upstream: {mark} the release or pull request that fixes it, and whether it is open.

Delete when: {mark} what has to happen first, as the matrix has it.
"""

from __future__ import annotations

{imports}

{constants}


{factories}

def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[{of}], {of}]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {{{table}}}
'''


def module(proposal: Proposal) -> str:
    """The text of the patch module. It runs as it is, and changes nothing."""
    function = proposal.kind == "function"
    names = [split_target(target)[1].rpartition(".")[2] for target in proposal.targets]
    unique = len(set(names)) == len(names)
    constants, factories, table = [], [], []
    for place, (target, name) in enumerate(zip(proposal.targets, names), 1):
        plain = name.strip("_").lower() if unique else f"{name.strip('_').lower()}_{place}"
        constants.append(f'{plain.upper()} = "{target}"')
        template = FUNCTION if function else OTHER
        factories.append(template.format(factory=f"_{plain}", name=name, mark=MARK, kind=proposal.kind))
        table.append(f"{plain.upper()}: _{plain}")
    imports = ["from collections.abc import Callable, Mapping", "from typing import Any"]
    if function:
        imports = ["import functools", *imports, "", "from shim.patches._arguments import Function"]
    return MODULE.format(
        mark=MARK,
        imports="\n".join(imports),
        constants="\n".join(constants),
        factories="\n\n".join(factories),
        of="Function" if function else "Any",
        table=", ".join(table),
    )


PROOF = '''\
"""Proof of {id}."""

from __future__ import annotations

from shim.testing.proof import Here, proof


# {mark} what is measured, in words, and the largest value that is right; then delete this comment.
@proof("gradient off by {{:.1e}}", bound=1e-6)
def {name}(here: Here) -> float:
    """{mark} what is wrong, in one sentence.

    {mark} how to reproduce it with upstream's own names, what happens, and what would be right.
    """
    raise NotImplementedError("{mark} do what goes wrong on stock, and return how far it is from the truth")
'''


def proof(proposal: Proposal) -> str:
    """The proof of the patch. It is broken until it is written."""
    return PROOF.format(id=proposal.id, name=proposal.name, mark=MARK)


TEST = '''\
"""{id}: {mark} what these tests show, in one sentence."""

import pytest
from needed import needed

import shim

CELLS = {cells}

ID = "{id}"
pytestmark = {marks}


def test_what_stock_does_right_stays():
    """{mark} in which case the patch has nothing to do."""
    with shim.patched(only=[ID], require=[ID]):
        pytest.fail("{mark} run that case, and compare with stock, bit for bit")
'''

ONE_RANK = '[needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py'


def _cells(proposal: Proposal) -> dict[str, str]:
    """Where `make test` runs them: on the newest release with the newest variant. Proofs show the other variants."""
    core = proposal.distribution == "megatron-core"
    shown = EVERYDAY if core else EVERYDAY_PAIRS
    for releases in reversed(proposal.variants.values()):
        of_it = [cell for cell in shown if cell.partition("+")[0 if core else 2] in releases]
        if of_it:
            return {of_it[-1]: "all"}
    return {shown[-1]: "all"}


def test(proposal: Proposal) -> str:
    """The tests of the patch. Each fails until it is written."""
    core = proposal.distribution == "megatron-core"
    return TEST.format(
        id=proposal.id,
        mark=MARK,
        marks=ONE_RANK if core else "needed(ID)",
        cells=json.dumps(_cells(proposal)),
    )

"""The proofs of all patches on the releases that are installed: stock is wrong where the matrix says so, and right with
the patch. Each side runs as `shim prove` runs it; what the command does with the results is in
tests/testing/test_prove.py.
"""

import functools
import math

import chosen
import pytest

import shim
from shim._matrix.load import load_matrix
from shim._matrix.model import RIGHT
from shim.testing.proof import Here, measure, proofs_of


@functools.cache
def plan():
    return shim.plan()


def cases(wanted, cell, everyday):
    """A parameter (id, proof) for each proof that runs on a CPU, in this process, and is `wanted(patch, proof)`.

    In `make test` those of `shown` alone; `make proofs` runs every proof on every release.
    """
    for id, patch in load_matrix().patches.items():
        proofs = [found for found in proofs_of(patch.module) if "cpu" in found.devices and wanted(patch, found)]
        here = shown(id, proofs, everyday).get(cell, ()) if chosen.ONCE and cell in everyday else proofs
        for found in here:
            yield pytest.param(id, found, id=f"{id}/{found.name}")


def shown(id, proofs, cells):
    """Cell -> those of the proofs of a patch that run there in `make test`, so that every variant is seen to be right.

    On the newest of `cells` with a variant one proof runs, one of this variant alone if there is any; on the newest
    that gets none, it says that stock is right. All others run once, on the newest of those that they are about, but
    for those on several ranks: they take a second and more each, and run under `make matrix`.
    """
    variants = {cell: next(iter(chosen.variants_of([id], cell)))[1] for cell in cells}
    newest = {variant: cell for cell, variant in variants.items()}
    found = {cell: [] for cell in newest.values()}
    for variant, cell in newest.items():
        about = [proof for proof in proofs if not (variant and proof.variants) or variant in proof.variants]
        found[cell] += sorted(about, key=lambda proof: not proof.variants)[:1]
    for proof in (proof for proof in proofs if proof.ranks == 1):
        about = [cell for variant, cell in newest.items() if variant and variant in (proof.variants or newest)]
        last = max(about, key=cells.index, default=None)
        if last and proof not in found[last]:
            found[last].append(proof)
    return found


def side(found, *ids):
    """What the proof gives with these patches, and with those that both sides need."""
    options = {id: dict(found.options) for id in ids} if found.options else None
    ids = [*ids, *found.beside]
    with shim.patched(only=ids, require=ids, options=options):
        return measure(found, Here(world=found.ranks, te=found.te))


@functools.cache
def on_stock(found):
    """The same, whatever the patches."""
    return side(found)


def assert_what_the_matrix_says(id, found):
    decision = plan()[id]
    if decision.action not in ("apply", *RIGHT):
        pytest.skip(f"{id}: {decision.action}")
    if decision.action == "apply" and found.variants and decision.variant not in found.variants:
        pytest.skip(f"{found.name} is about the variants {', '.join(found.variants)}")
    stock = on_stock(found)
    if stock.state == "cannot run":
        pytest.skip(stock.text)
    sides = {"stock": (stock, "right" if decision.action in RIGHT else "wrong")}
    if decision.action == "apply" and stock.state == "wrong":
        sides["with the patch"] = (side(found, id), "right")
        if sides["with the patch"][0].state == "cannot run":  # stock fails before it asks torch for what torch lacks
            pytest.skip(sides["with the patch"][0].text)
    if any(shown.state != wanted for shown, wanted in sides.values()):
        # What is wrong comes first, because pytest's summary has the first line.
        lines = [_in_words(name, found, *both) for name, both in reversed(sides.items())]
        lines.append(f"variant {decision.variant}" if decision.variant else f"{decision.action} by the matrix")
        lines += [shown.details for shown, _ in sides.values() if shown.state == "broken"]
        pytest.fail("\n".join(lines), pytrace=False)  # the lines of this file say nothing of the proof


def _in_words(name, found, shown, wanted):
    """A side in one line: what it is, what it has to be, and the number, if there is one."""
    verdict = f"{shown.state}, as it has to be" if shown.state == wanted else f"{shown.state}, and has to be {wanted}"
    finite = shown.value is not None and math.isfinite(shown.value)
    number = f" (measured {shown.value:g}, right up to {found.bound:g})" if finite else ""
    return f"{name} is {verdict}: {shown.text}{number}, {shown.seconds:.1f} s"

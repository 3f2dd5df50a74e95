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

    In `make test` each runs once, on the newest of the `everyday` cells whose variant it is about. The patch's own test
    runs once per variant, and `make proofs` runs every proof on every release.
    """
    for id, patch in load_matrix().patches.items():
        proofs = [found for found in proofs_of(patch.module) if "cpu" in found.devices and wanted(patch, found)]
        for found in proofs:
            if chosen.ONCE and cell in everyday and cell not in _where_applied(id, found, everyday)[-1:]:
                continue
            yield pytest.param(id, found, id=f"{id}/{found.name}")


def _where_applied(id, found, cells):
    """Those of `cells` with a variant of the patch that the proof is about."""
    variants = {cell: {variant for _, variant in chosen.variants_of([id], cell) if variant} for cell in cells}
    return [cell for cell in cells if variants[cell] and (not found.variants or variants[cell] & {*found.variants})]


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

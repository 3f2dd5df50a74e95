"""The proofs of all patches on the releases that are installed: stock is wrong where the matrix says so, and right with
the patch. Each side runs as `shim prove` runs it; what the command does with the results is in
tests/testing/test_prove.py.
"""

import functools

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

    In `make test` those of a patch run once per variant, on the newest of the `everyday` cells that has it. Of several
    proofs each such cell runs every second one, beginning with another.
    """
    for id, patch in load_matrix().patches.items():
        proofs = [found for found in proofs_of(patch.module) if "cpu" in found.devices and wanted(patch, found)]
        for number, found in enumerate(proofs):
            if chosen.ONCE and cell in everyday:
                showing = chosen.cells_showing((id,), tuple(everyday))
                sharing = [place for place in everyday if place in showing and _is_about(found, id, place)]
                if cell not in sharing or (len(proofs) > 1 < len(sharing) and (number + sharing.index(cell)) % 2):
                    continue
            yield pytest.param(id, found, id=f"{id}/{found.name}")


def _is_about(found, id, cell):
    """Whether a proof of a patch says something of its variant on a cell."""
    return not found.variants or any(variant in found.variants for _, variant in chosen.variants_of([id], cell))


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
    print(
        f"{id}/{found.name} ({decision.variant}), stock: {stock.text}, {stock.seconds:.1f} s"
    )  # in a failure's report
    if stock.state == "cannot run":
        pytest.skip(stock.text)
    if decision.action in RIGHT:
        assert stock.state == "right", stock
        return
    assert stock.state == "wrong", stock
    patched = side(found, id)
    print(f"with the patch: {patched.text}, {patched.seconds:.1f} s")
    assert patched.state == "right", patched

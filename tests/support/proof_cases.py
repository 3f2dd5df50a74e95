"""The proofs of all patches on the releases that are installed: stock is wrong where the matrix says so, and right with
the patch. Each side runs as `shim prove` runs it; what the command does with the results is in
tests/testing/test_prove.py.
"""

import functools

import chosen
import pytest

import shim
from shim._matrix.load import load_matrix
from shim.testing.proof import Here, measure, proofs_of


@functools.cache
def plan():
    return shim.plan()


def cases(wanted, cell, everyday):
    """A parameter (id, proof) for each proof that runs on a CPU, in this process, and is `wanted(patch, proof)`.

    In `make test` those of a patch run once per variant, on the newest of the `everyday` cells that has it.
    """
    for id, patch in load_matrix().patches.items():
        if chosen.ONCE and cell in everyday and cell not in chosen.cells_showing((id,), tuple(everyday)):
            continue
        for found in proofs_of(patch.module):
            if "cpu" in found.devices and wanted(patch, found):
                yield pytest.param(id, found, id=f"{id}/{found.name}")


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
    if decision.action not in ("apply", "upstream"):
        pytest.skip(f"{id}: {decision.action}")
    if decision.action == "apply" and found.variants and decision.variant not in found.variants:
        pytest.skip(f"{found.name} is about the variants {', '.join(found.variants)}")
    stock = on_stock(found)
    print(
        f"{id}/{found.name} ({decision.variant}), stock: {stock.text}, {stock.seconds:.1f} s"
    )  # in a failure's report
    if stock.state == "cannot run":
        pytest.skip(stock.text)
    if decision.action == "upstream":
        assert stock.state == "right", stock
        return
    assert stock.state == "wrong", stock
    patched = side(found, id)
    print(f"with the patch: {patched.text}, {patched.seconds:.1f} s")
    assert patched.state == "right", patched

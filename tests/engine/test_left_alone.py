"""What somebody else has put on targets stays, in combinations that mutants of the engine have shown to be untested."""

import functools

import pytest
from fake_world import same

import shim

CORE = "megatron.core."
PAIR = ("forward", "backward")


@pytest.mark.parametrize("calls", [True, False])
def test_of_a_pair_both_are_left_alone_where_both_were_replaced(world, calls):
    """revert() raises nothing, and names both; when they are gone, nothing is left."""
    world.patch("p", [CORE + f"layers:Layer.{name}" for name in (*PAIR, "make")])
    before = world.snapshot()
    shim.apply()
    ours = {name: world.get(f"layers:Layer.{name}") for name in PAIR}
    # partial calls what it holds and cannot be written to; the other holds nothing.
    foreign = {name: functools.partial(ours[name]) if calls else (lambda self, x: x) for name in PAIR}
    for name in PAIR:
        world.set(f"layers:Layer.{name}", foreign[name])
    report = shim.revert()
    assert all(world.get(f"layers:Layer.{name}") is foreign[name] for name in PAIR)
    assert world.get("layers:Layer.make") is before["layers:Layer", "make"]
    assert len([text for text in report.lost if any(name in text for name in PAIR)]) == 2, report.lost
    for name in PAIR:
        world.set(f"layers:Layer.{name}", ours[name])
    assert shim.revert().lost == ()
    assert same(before, world.snapshot()) == []

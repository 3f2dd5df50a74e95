"""A release with a body that is in no release, and what a lock says of a patch there."""

import pytest
from unit_helpers import BROKEN, PATCH, write_file

import shim
from shim._planning.bodies import Bodies
from shim._releases.known_files import measure_files

EDITED = BROKEN.replace("return helper(x)", "return helper(x) + 1")
EDITED_AGAIN = BROKEN.replace("return helper(x)", "return helper(x) + 2")
BODIES = ("megatron.core.roll:roll", "megatron.core.roll:Layer.forward", "megatron.core.roll:helper")


@pytest.fixture
def tree(world, monkeypatch):
    """A world with an edited release, which nobody has seen, and a trainer's patch for it."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    world.install(EDITED)
    world.lock = world.root / "shim.lock"
    yield world
    shim.revert()


def verdict(world, verdict, variant="old", **more):
    """What a lock says of roll-fix on the tree that is installed."""
    plan = world.plan()
    entry = plan.matrix.patches["roll-fix"]
    found = Bodies(entry, plan.environment, plan.matrix)
    bodies = found.here() if variant is None else found.of(entry.variants[variant])
    said = {"verdict": verdict, "variant": variant, "fingerprints": bodies, "shown": "1e-1 -> 0", "proofs": {}}
    return {**said, **more}


def proved(world, said):
    files = {}
    measure_files(world.plan().environment.sources, BODIES, files)
    about = {"date": "2026-01-02", "python": "3.11", "torch": "2.13.0", "where": "CPU"}
    return {**about, "generic": {}, "files": files, "patches": {"roll-fix": said}}

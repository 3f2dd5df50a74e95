"""What a patch keeps in the process: status() tells of it, and it ends with the patch."""

import logging
import sys

import pytest

import shim

CORE = "megatron.core."
PATCH = """
    from shim._resources import Bindings, Resource

    MADE = []
    STAYS = False


    class Buffer:
        def __init__(self, size):
            self.size = size

        def held(self):
            return f"a buffer of {self.size} bytes" if self.size else ""

        def release(self):
            if self.size == 13:
                raise RuntimeError("stuck")
            if not STAYS:
                self.size = 0


    def bindings(variant, options):
        buffer = Buffer(options.get("size", 8))
        MADE.append(buffer)
        found = {target: lambda original: original if not callable(original) else wrap(original) for target in TARGETS}
        return Bindings(found, Resource(buffer.held, buffer.release))


    def wrap(original):
        def double(x, scale=2):
            return original(x, scale)

        return double
    """


@pytest.fixture
def keeping(world):
    world.patch("keeps", [CORE + "ops:double"], PATCH, options={"size": 8})
    world.get("ops:double")
    return world


def made():
    return sys.modules["fake_patches.keeps"].MADE


def test_status_tells_of_it_and_revert_ends_it(keeping):
    report = shim.apply()
    assert report["keeps"].holds == ("a buffer of 8 bytes",)
    assert "keeps a buffer of 8 bytes" in str(report)
    assert report.to_dict()["patches"]["keeps"]["holds"] == ["a buffer of 8 bytes"]
    assert shim.check()["keeps"].holds == ("a buffer of 8 bytes",)
    assert shim.revert()["keeps"].holds == ()
    assert [buffer.size for buffer in made()] == [0]


def test_it_is_made_anew_with_other_options(keeping):
    """The factories of other options are others, and so is what they keep."""
    shim.apply()
    assert shim.apply(options={"keeps": {"size": 20}})["keeps"].holds == ("a buffer of 20 bytes",)
    assert [buffer.size for buffer in made()] == [0, 20]
    with shim.patched(exclude="keeps") as report:
        assert report["keeps"].holds == ()
    assert shim.status()["keeps"].holds == ("a buffer of 20 bytes",)
    assert [buffer.size for buffer in made()] == [0, 0, 20]


def test_what_cannot_end_yet_is_told_of_until_it_can(keeping):
    """A pool in which tensors of a graph live, say; asked again whenever somebody looks."""
    shim.apply()
    sys.modules["fake_patches.keeps"].STAYS = True
    assert shim.revert()["keeps"].holds == ("a buffer of 8 bytes",)
    assert shim.apply()["keeps"].holds == ("a buffer of 8 bytes",) * 2
    assert shim.revert()["keeps"].state == "excluded"
    sys.modules["fake_patches.keeps"].STAYS = False
    assert shim.status()["keeps"].holds == ()
    assert [buffer.size for buffer in made()] == [0, 0]


def test_an_error_in_the_release_is_a_warning(keeping, caplog):
    shim.apply(options={"keeps": {"size": 13}})
    with caplog.at_level(logging.WARNING, "shim"):
        report = shim.revert()
    assert report["keeps"].holds == ("a buffer of 13 bytes",)
    assert [r.getMessage() for r in caplog.records] == ["keeps could not release its resource: RuntimeError: stuck"]
    made()[0].size = 0


def test_a_patch_that_fails_keeps_nothing(keeping):
    keeping.patch("fails", [CORE + "ops:double"], PATCH + "\n\n    def wrap(original):\n        raise ValueError\n")
    with pytest.raises(shim.BindError):
        shim.apply()
    assert [buffer.size for buffer in sys.modules["fake_patches.fails"].MADE] == [0]

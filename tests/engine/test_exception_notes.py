"""An exception that nobody catches names the patches whose code it has passed through, and how to run without them."""

import os
import subprocess
import sys
import threading
from textwrap import dedent

import pytest
from fake_world import World
from unit_helpers import REPOSITORY

import shim
from shim._engine import engine
from shim._engine.log import note_for
from shim.testing.patience import patience

DOUBLE = "megatron.core.ops:double"
INNER = """
    import functools

    def bindings(variant, options):
        return {target: wrap for target in TARGETS}

    def wrap(original):
        @functools.wraps(original)
        def double(x, scale=2):
            if x is None:
                raise ValueError("none")
            if x == "twice":
                return wrap(original)(None)
            return original(x, scale)
        return double
    """
SAID = "shim: this exception passed through code of "


@pytest.fixture
def double(world):
    """A patched function, beneath two patches of which the inner one raises for None."""
    world.patch("inner", [DOUBLE], INNER)
    world.patch("outer", [DOUBLE])
    shim.apply()
    from megatron.core import ops

    yield ops.double
    shim.revert()


def caught(function, *arguments):
    with pytest.raises(BaseException) as info:
        function(*arguments)
    return info.value


def note(error):
    return note_for(error, engine.ENGINE.plan)


def test_the_patches_are_named_from_the_inside_out(double):
    """Each once, with the variable that leaves them out, and what a report needs."""
    assert note(caught(double, None)) == (
        f"{SAID}patches inner, outer, and need not come from there. To run without them: "
        "MEGATRON_SHIM_EXCLUDE=inner,outer. To report it, add the output of `shim doctor`."
    )
    assert note(caught(double, "twice")) == note(caught(double, None))  # twice through the same patch
    shim.apply(only=["inner"])
    from megatron.core import ops

    assert note(caught(ops.double, None)).startswith(f"{SAID}the patch inner, and need not")


def test_what_upstream_raises_beneath_a_patch_has_a_note_as_well(double):
    assert note(caught(double, object())).startswith(f"{SAID}patches inner, outer, ")


def test_causes_count(double):
    """An error that the trainer raises about it, with or without `from`, but not one raised `from None`."""

    def convert(how):
        try:
            double(None)
        except ValueError as error:
            if how == "with":
                raise RuntimeError("x") from error
            if how == "none":
                raise RuntimeError("x") from None
            raise RuntimeError("x")

    assert note(caught(convert, "with")) == note(caught(convert, "without")) == note(caught(double, None))
    assert note(caught(convert, "none")) == ""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit, shim.OptionError])
def test_what_is_no_error_of_a_patch_has_no_note(double, monkeypatch, kind):
    """An interrupt, the end of a generator, and errors of shim's, which name their patch themselves."""

    def fail(x, scale=2):
        raise kind("x")

    shim.apply(only=["inner"])
    from megatron.core import ops

    holder = next(cell for cell in ops.double.__closure__ if callable(cell.cell_contents))
    monkeypatch.setattr(holder, "cell_contents", fail)
    assert note(caught(ops.double, 1)) == ""


def test_an_error_elsewhere_has_no_note(double):
    assert note(caught(int, "x")) == ""
    assert note(ValueError("never raised")) == ""


def test_functions_are_what_the_factories_made(double):
    """Nothing comes between, which a call would pay for: the hooks read the frames once an exception has ended all."""
    assert double.__code__.co_filename.endswith("outer.py")
    inner = next(cell.cell_contents for cell in double.__closure__ if callable(cell.cell_contents))
    assert inner.__code__.co_filename.endswith("inner.py")
    error = caught(double, None)
    assert not getattr(error, "__notes__", None)  # of a caught exception nothing was asked
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(os.path.basename(traceback.tb_frame.f_code.co_filename))
        traceback = traceback.tb_next
    assert frames[-2:] == ["outer.py", "inner.py"]


def test_revert_gives_the_hooks_back(world):
    """The very objects; a hook that other code has put over shim's stays, and its calls go on to what was before."""
    world.patch("inner", [DOUBLE], INNER)
    before = sys.excepthook, threading.excepthook
    shim.apply()
    shim.apply()
    assert sys.excepthook is not before[0] and threading.excepthook is not before[1]
    shim.revert()
    assert (sys.excepthook, threading.excepthook) == before
    with shim.patched():
        assert sys.excepthook is not before[0]
    assert sys.excepthook is before[0]


def test_a_foreign_hook_over_shims_stays(world, monkeypatch):
    world.patch("inner", [DOUBLE], INNER)
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(getattr(error, "__notes__", [])))
    shim.apply()
    from megatron.core import ops

    ours = sys.excepthook

    def foreign(*arguments):
        ours(*arguments)

    sys.excepthook = foreign
    error = caught(ops.double, None)
    foreign(ValueError, error, error.__traceback__)
    foreign(ValueError, error, error.__traceback__)  # no second note
    shim.revert()
    assert sys.excepthook is foreign
    error = caught(int, "x")
    foreign(ValueError, error, error.__traceback__)
    assert len(seen) == 3 and seen[2] == []
    if sys.version_info >= (3, 11):
        assert [len(notes) for notes in seen[:2]] == [1, 1]
    shim.apply()
    assert sys.excepthook is foreign  # which calls shim's hook
    shim.revert()


class OddError(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("odd")


def test_an_odd_exception_is_printed_all_the_same(world, monkeypatch):
    world.patch("inner", [DOUBLE], INNER)
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    shim.apply()
    error = OddError()
    sys.excepthook(OddError, error, None)
    sys.excepthook(OddError, None, None)
    assert seen == [error, None]
    shim.revert()


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_program_that_ends_by_an_exception_prints_the_note_once(tmp_path, where):
    """Below the traceback; before Python 3.11, which has no notes, as a message of the logger shim."""
    world = World(tmp_path / "tree")
    world.patch("inner", [DOUBLE], INNER)
    call = {
        "main": "ops.double(None)",
        "thread": "t = threading.Thread(target=ops.double, args=(None,)); t.start(); t.join()",
    }
    code = f"""
        import threading, shim
        shim.apply(packages="fake_patches")
        from megatron.core import ops
        {call[where]}
        """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_SHIM_")}
    environ |= {
        "PYTHONPATH": os.pathsep.join([str(world.root), str(REPOSITORY)]),
        "MEGATRON_SHIM_MATRIX": str(world.matrix),
    }
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], env=environ, capture_output=True, text=True, timeout=patience()
    )
    assert done.returncode == (1 if where == "main" else 0)
    lines = done.stderr.splitlines()
    assert "ValueError: none" in lines
    [said] = [line for line in lines if SAID in line]
    assert "MEGATRON_SHIM_EXCLUDE=inner." in said
    if sys.version_info >= (3, 11):
        assert lines.index(said) == lines.index("ValueError: none") + 1

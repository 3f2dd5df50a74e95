"""Runs code for a test of the engine in a process of its own, with a time limit, beside a fake world with patches."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from fake_world import World
from thorough import times

from shim.testing.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = '''
    import gc, importlib, sys, threading, time
    import shim
    from shim._engine import engine as _engine
    from fake_world import World, same, trust_fake_patches
    from shim.testing.patience import patience

    trust_fake_patches()
    CORE = "megatron.core."


    def snapshot():
        return World.snapshot(None)


    def finders():
        return [f for f in sys.meta_path if getattr(f, "is_shim_finder", False)]


    def search_less():
        "Look for aliases in the fake world only, which is what takes the time of a cycle."
        from shim._engine import transactions as _bind
        search = _bind.find_aliases
        names = lambda: [n for n in sys.modules if n.startswith("megatron")]
        _bind.find_aliases = lambda values, among=None: search(values, names() if among is None else among)


    def load(name):
        """Import; again where importlib lost a race with itself: while it takes a module that it has just run out of
        sys.modules and puts it back, the import of a submodule in another thread looks for its parent there in vain."""
        while True:
            try:
                return importlib.import_module(name)
            except KeyError as error:
                innermost = error.__traceback__
                while innermost.tb_next:
                    innermost = innermost.tb_next
                if not innermost.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                    raise


    def expect(truth, *what):  # an assert that python -O keeps
        if not truth:
            raise SystemExit(f"not so: {what}")
    '''


def tree_with_patches(root):
    """The fake world with two patches of several targets each, for other processes."""
    world = World(root)
    world.patch("count", ["megatron.core.ops:double", "megatron.core.layers:Layer.forward"])
    world.patch("more", ["megatron.core.ops:halve", "megatron.core.layers:Layer.make", "megatron.core.ops:double"])
    return world


def run(code, tree, *flags, **variables):
    seconds = patience(times(600, 1800))
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("MEGATRON_SHIM_", "PYTHON"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, (tree.root, REPOSITORY, REPOSITORY / "tests/support"))),
        "MEGATRON_SHIM_MATRIX": str(tree.matrix),
        **variables,
    }
    # A deadlock shows where it is, and ends.
    limit = f"import faulthandler; faulthandler.dump_traceback_later({seconds - 10}, exit=True)\n"
    code = limit + dedent(HEAD) + dedent(code)
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
    return done.stdout

"""Factories run under the engine's lock: on the real release, none of them imports anything."""

from textwrap import dedent

import fork_server
import pytest
from contract_cases import can_be_imported
from factories import imports_of_factories

import shim
from shim import testing
from shim.testing.patience import patience

CELLS = "every"

PLAN = shim.plan()
WANTED = [id for id, decision in PLAN.decisions.items() if decision.wanted and can_be_imported(decision)]


@pytest.mark.parametrize("id", WANTED)
def test_factories_import_nothing(id):
    """Not even what is loaded: while it is being imported elsewhere, an import waits for it."""
    assert imports_of_factories(PLAN, id) == []


# One thread imports megatron.core for the first time, and is behind rope_utils, but not at its end, while another
# one applies.
TWO_THREADS = dedent(
    """
    import sys, threading
    from importlib.machinery import PathFinder
    import torch, shim

    NEXT = "megatron.core.models.common.embeddings.language_model_embedding"  # no patch binds anything there
    paused, applied = threading.Event(), threading.Event()

    class Pause:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = PathFinder.find_spec(name, path) if name == NEXT else None
            if spec is not None:
                run = spec.loader.exec_module
                def exec_module(module):
                    paused.set()
                    in_time.append(applied.wait(LIMIT))
                    if not in_time[0]:
                        raise SystemExit("apply() waits for the import, which would wait for its lock")
                    run(module)
                spec.loader.exec_module = exec_module
            return spec

    def apply():
        paused.wait()
        shim.apply()
        applied.set()

    in_time = []
    sys.meta_path.insert(0, Pause)
    threading.Thread(target=apply, daemon=True).start()
    import megatron.core
    assert in_time == [True]
    assert shim.status()["rope-fusion"].state == "applied", shim.status()
    """
)


@pytest.mark.skipif(testing.release() != "0.16.1", reason="one release says it: starting a process takes seconds")
def test_apply_while_another_thread_imports_megatron():
    """Neither waits for the other."""
    done = fork_server.run(f"LIMIT = {patience()}\n{TWO_THREADS}", share_loaded=True)
    assert done.returncode == 0, done.stderr[-3000:]

"""Wrappers and import hooks of wrapt on a real release, with the patches that are shipped."""

import json
import os
import subprocess
import sys

import pytest
from megatron.core.models.common.embeddings import rope_utils

import shim
from shim import testing
from shim.testing.patience import patience

CELLS = "every"

pytestmark = pytest.mark.skipif(testing.release() != "0.16.1", reason="nothing in it depends on the release")
wrapt = pytest.importorskip("wrapt")

PLANNED = """
import json, sys, wrapt
for name in sys.argv[1:]:
    wrapt.register_post_import_hook(lambda module: None, name)
import shim
plan = shim.plan()
wanted = [id for id in plan if plan[id].wanted]
print(json.dumps([wanted, sorted({"torch", "megatron", "megatron.core"} & set(sys.modules))]))
"""


def test_plan_imports_nothing_where_wrapt_has_hooks():
    """Its finder imports what it has a hook for, with torch, when it is asked for it."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", PLANNED, rope_utils.__name__, "megatron.core.transformer.attention"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=patience()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, imported = json.loads(done.stdout)
    assert "rope-fusion" in wanted and imported == []


def test_a_wrapper_of_wrapt_is_no_conflict(monkeypatch):
    """It calls what it wraps, also where it was there first. It is named, and not taken for upstream's function."""
    upstream = rope_utils.apply_rotary_pos_emb
    wrapper = wrapt.FunctionWrapper(upstream, lambda call, self, args, kwargs: call(*args))
    monkeypatch.setattr(rope_utils, "apply_rotary_pos_emb", wrapper)
    with shim.patched(only=["rope-fusion"]) as report:
        found = report["rope-fusion"]
        assert found.state == "applied" and wrapper.__wrapped__ is not upstream
        assert "FunctionWrapper with" in found.others[0] and "test_others" in found.others[0]
    assert wrapper.__wrapped__ is upstream


def test_a_replacement_costs_only_what_it_replaces(monkeypatch, caplog):
    """A trainer's own loss of multi-token prediction keeps the rolls and the recompute of the patch."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    monkeypatch.setattr(GPTModel, "_postprocess", lambda self, *args, **kwargs: None)
    found = shim.plan(only=["mtp-packed-sequences"])["mtp-packed-sequences"]
    # Only a model can tell whether it keeps what the patch does: until check(model) nobody knows.
    target = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"
    assert found.action == "apply" and "test_others" in found.skipped[target]

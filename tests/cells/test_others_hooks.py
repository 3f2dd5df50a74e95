"""Wrappers and import hooks of wrapt on a real release, with the patches that are shipped."""

import json
import os
import subprocess
import sys

import pytest
from megatron.core.models.common.embeddings import rope_utils

import shim
from shim import testing

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
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, imported = json.loads(done.stdout)
    assert "rope-fusion" in wanted and imported == []


def test_a_wrapper_of_wrapt_is_a_conflict(monkeypatch):
    """And not taken for upstream's function, whose code it lends."""
    wrapper = wrapt.FunctionWrapper(rope_utils.apply_rotary_pos_emb, lambda call, self, args, kwargs: call(*args))
    monkeypatch.setattr(rope_utils, "apply_rotary_pos_emb", wrapper)
    found = shim.plan(only=["rope-fusion"])["rope-fusion"]
    assert found.action == "conflict" and "FunctionWrapper with" in found.reason and "test_others" in found.reason

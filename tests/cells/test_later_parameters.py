"""A release with a parameter more: every wrapper of these patches passes it on to upstream, or is refused at once."""

import functools
import importlib
import inspect
import re
import sys
import types

import pytest
import torch

import shim
from shim import testing
from shim._engine.factories import misfit

CELLS = "every"

IDS = ("mtp-packed-sequences", "mtp-recompute", "mtp-without-te", "rope-thd", "rope-fusion", "mla-rope-table")
PLAN = shim.plan()
TARGETS = [(id, target) for id in IDS if PLAN[id].wanted for target in PLAN[id].targets]
# Those that take the place of upstream's function, so that they cannot know what a parameter more is for.
REPLACED = {"_roll_tensor_packed_seq", "_apply_rotary_pos_emb_thd", "_checkpointed_forward"}
REPLACED_ROLLS = {("mtp-loss-cp", "v0_12"), ("mtp-packed-sequences", "v0_12"), ("mtp-packed-sequences", "v0_14")}
# In the place of `self` and of a config: everything is off.
OFF = dict.fromkeys(("fp8", "fp4", "apply_rope_fusion", "mtp_num_layers", "recompute_granularity", "cp_group"))
NOTHING = types.SimpleNamespace(**OFF, post_process=False, training=False, config=types.SimpleNamespace(**OFF))


class Reached(Exception):
    """Upstream's function was called with the parameter."""


def upstreams(target):
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def with_a_parameter_more(stock):
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def later(*args, told=None, **kwargs):
        raise Reached(told)

    added = inspect.Parameter("told", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    named = [p for p in signature.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind > p.POSITIONAL_OR_KEYWORD]
    later.__signature__ = signature.replace(parameters=[*(p.replace(default=None) for p in named), added, *rest])
    return later


@pytest.mark.parametrize(("id", "target"), TARGETS, ids=[target.rpartition(":")[2] for _, target in TARGETS])
def test_a_parameter_more_reaches_upstream_or_the_patch_is_refused(id, target, monkeypatch):
    if id == "mtp-without-te":  # asks upstream only where Transformer Engine is installed
        monkeypatch.setattr(sys.modules[target.partition(":")[0]], "InferenceColumnParallelLinear", object)
    entry = PLAN.matrix.patches[id]
    factory = importlib.import_module(entry.module).bindings(PLAN[id].variant, PLAN[id].options)[target]
    later = with_a_parameter_more(upstreams(target))
    wrapper = factory(later)
    refused = misfit(wrapper, later)
    name = re.split("[:.]", target)[-1]
    if name in REPLACED or (name == "roll_tensor" and (id, PLAN[id].variant) in REPLACED_ROLLS):
        assert refused
        return
    assert refused == ""
    first = next(iter(inspect.signature(later).parameters))
    given = {"config": NOTHING.config} if id == "rope-fusion" else {}
    if target.endswith("MultiTokenPredictionBlock.forward"):
        given["labels"] = torch.ones(1, 2)  # without any, nothing is predicted
    with testing.megatron_on_cpu(), pytest.raises(Reached, match="this"):
        wrapper({"self": NOTHING, "tensor": torch.ones(1)}.get(first), told="this", **given)


def test_all_targets_are_tried():
    assert len({target for _, target in TARGETS}) >= 5 and "megatron.core" in sys.modules

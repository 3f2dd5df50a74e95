"""What stands on a target is upstream's because shim has seen that it is, also after an alias was given back.

Somebody replaces an alias and takes that back, and has put a function on the target before shim looks again.
"""

import functools
import importlib

import pytest
from contract_cases import import_targets

import shim
from shim._engine.engine import ENGINE

CELLS = {"0.12.0": "all"}

ABOUT = ["rope-fusion"]  # the patches, see chosen.py

CORE = "megatron.core."
ROPE = (
    "rope-fusion",
    CORE + "models.common.embeddings.rope_utils",
    CORE + "transformer.attention",
    "apply_rotary_pos_emb",
)
LOSS = (
    "label-smoothing",
    CORE + "tensor_parallel.cross_entropy",
    CORE + "tensor_parallel",
    "vocab_parallel_cross_entropy",
)


def calls_it(found):
    @functools.wraps(found)
    def theirs(*args, **kwargs):
        return found(*args, **kwargs)

    return theirs


def replaces_it(found):
    def theirs(*args, **kwargs):
        return None

    return theirs


def replace_alias_and_target(module, alias, name, kind, looks):
    """The function that was put on the target, and the report while it stands there. Both names are given back."""
    with pytest.MonkeyPatch.context() as on_alias:
        on_alias.setattr(alias, name, kind(getattr(alias, name)))
        shim.status()
    with pytest.MonkeyPatch.context() as on_target:
        theirs = kind(getattr(module, name))
        on_target.setattr(module, name, theirs)
        if looks:
            report = shim.status()
            assert getattr(module, name) is theirs, "what somebody has put there was taken away"
            return theirs, report
    return theirs, None


@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "not looked at"])
@pytest.mark.parametrize("kind", [calls_it, replaces_it])
@pytest.mark.parametrize("place", [ROPE, LOSS], ids=["rope", "loss"])
def test_a_function_on_a_target_is_not_taken_for_upstreams(place, kind, looks):
    id, module, alias, name = place
    import_targets(shim.plan())
    module, alias = importlib.import_module(module), importlib.import_module(alias)
    upstream = getattr(module, name)
    assert getattr(alias, name) is upstream
    try:
        wanted = shim.apply()[id].state
        ours = getattr(module, name)
        theirs, report = replace_alias_and_target(module, alias, name, kind, looks)
        if report is not None:
            # Some releases can do without the target: then it is named, and the rest of the patch holds.
            told = report[id].state == "conflict" or any("theirs" in text for text in report[id].others)
            assert told if kind is replaces_it else report[id].state == wanted, str(report[id])
        again = shim.status()
        assert again[id].state == wanted and not again.lost, again.lost
        bases = [chain.base for chain in ENGINE.binder.chains.values()]
        assert theirs not in bases
        assert getattr(module, name) is getattr(alias, name)
        assert (getattr(module, name) is not upstream) == (ours is not upstream)
    finally:
        report = shim.revert()
    assert getattr(module, name) is upstream and getattr(alias, name) is upstream
    assert not report.lost

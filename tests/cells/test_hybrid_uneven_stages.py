"""hybrid-uneven-stages: stages are cut as asked, and as stock cuts them if nothing is asked."""

import pytest

import shim
from shim import testing
from shim.patches.megatron_core.hybrid_uneven_stages.proof import FIRST, PATTERN, config_of, selected
from shim.testing import Layout

CELLS = {"0.14.0": "all"}

ID = "hybrid-uneven-stages"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")
LAST = len(PATTERN) - FIRST
ALL = "".join(PATTERN)


def on_stage(first, last, on):
    """(number of the first layer, types of layers) of this stage."""
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2)):
        with shim.patched(only=[ID] if on else [], require=[ID] if on else []):
            return selected(first, last)


@pytest.mark.parametrize(("first", "last"), [(FIRST, LAST), (FIRST, None), (None, LAST), (1, None), (4, 2)])
def test_each_stage_has_its_layers(ranks2, first, last):
    if None not in (first, last) and testing.release().startswith("0.12"):
        pytest.skip("without a stage in the middle 0.12 divides by zero, in every attention layer too")
    cut = first if first is not None else len(PATTERN) - last
    assert ranks2.run(on_stage, first, last, True) == [(0, ALL[:cut]), (cut, ALL[cut:])]


def test_without_the_options_nothing_changes(ranks2):
    stock, found = (ranks2.run(on_stage, None, None, on) for on in (False, True))
    assert found == stock == [(0, ALL[:3]), (3, ALL[3:])]


def numbers_of_stage(on):
    """Where this stage begins, as attention layers number themselves, and as the stack numbers its other layers."""
    from megatron.core.transformer import transformer_layer

    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(pp=2)):
        with shim.patched(only=[ID] if on else [], require=[ID] if on else []):
            return transformer_layer.get_transformer_layer_offset(config_of(FIRST, None)), selected(FIRST, None)[0]


@pytest.mark.parametrize("on", [False, True], ids=["stock", "patched"])
def test_layers_of_all_kinds_count_alike(ranks2, on):
    """On stock the stack counts otherwise than its attention layers."""
    assert all(own == stack for own, stack in ranks2.run(numbers_of_stage, on)) == on

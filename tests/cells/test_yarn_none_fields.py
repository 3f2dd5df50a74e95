"""yarn-none-fields: the factor of YaRN is 1.0 where its field is None, and upstream's everywhere else."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.transformer import attention
from needed import needed

import shim
from shim import testing

CELLS = {"0.16.1": "all"}

ID = "yarn-none-fields"
NAME = "_yarn_get_concentration_factor_from_config"
OF_0_15 = testing.release().startswith("0.15.")
pytestmark = needed(ID)
RIGHT = [(), (4.0, 1.0, 0.5), (0.5, 1.0, 1.0), (4.0, 0.707, 0.707), (4.0, 0.0, 1.0)]
# Without a value for one of the other fields. 0.15 takes 1.0 or raises.
WITHOUT = [(4.0,), (4.0, None, None), (4.0, 1.0, None), (4.0, None, 1.0), (4.0, 0.5), (1.0,), (0.5, None, None)]


def config(*values):
    names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    return SimpleNamespace(**dict(zip(names, values, strict=False)))


@pytest.mark.parametrize("values", RIGHT + ([] if OF_0_15 else WITHOUT))
def test_what_stock_does_right_stays(values):
    expected = getattr(yarn, NAME)(config(*values))
    with shim.patched(only=[ID], require=[ID]):
        assert getattr(yarn, NAME)(config(*values)) == getattr(yarn, NAME)(config=config(*values)) == expected


@pytest.mark.parametrize("values", [(None, None, None), (None, 1.0, 0.5), (None,)])
def test_a_field_that_is_none_counts_as_absent(values):
    with shim.patched(only=[ID], require=[ID]):
        assert getattr(yarn, NAME)(config(*values)) == 1.0


@pytest.mark.parametrize("values", WITHOUT)
def test_without_mscale_the_factor_is_that_of_the_paper(values):
    """In all releases, and in the table as well. It is 1.0 if the scaling does not stretch."""
    scaling, *fields = values
    expected = pytest.approx(0.1 * math.log(max(scaling, 1.0)) + 1)
    with shim.patched(only=[ID], require=[ID]):
        assert getattr(yarn, NAME)(config(*values)) == expected
        if len(fields) == 2:
            assert yarn._yarn_get_concentration_factor(scaling, *fields) == expected
            assert yarn._yarn_get_concentration_factor(scaling, mscale=fields[0], mscale_all_dim=fields[1]) == expected


def table(*fields):
    with testing.layout_initialised(testing.Layout()):
        rotary = yarn.YarnRotaryEmbedding(8, 1.0, False, None, 10000.0, True, 32.0, 16, 32.0, 1.0, *fields)
        return rotary(6)


def test_the_table_is_that_of_the_same_factor():
    """Angles do not depend on it."""
    angles, factor = table(1.0, 0.0)
    with shim.patched(only=[ID], require=[ID]):
        found = table(None, None)
        again = table(1.0, 0.0)
    assert torch.equal(found[0], angles) and torch.equal(again[0], angles)
    assert found[1] == again[1] == factor == pytest.approx(1.3466, abs=1e-4)


def test_the_cache_of_the_factor_can_be_cleared():
    with shim.patched(only=[ID], require=[ID]):
        yarn._yarn_get_concentration_factor(4.0, 1.0, 0.0)
        assert yarn._yarn_get_concentration_factor.cache_info().currsize > 0
        yarn._yarn_get_concentration_factor.cache_clear()
        assert yarn._yarn_get_concentration_factor.cache_info().currsize == 0


def bridges(config):
    """As model providers of a trainer do it: the fields of None are not there."""
    kept = {name: value for name, value in vars(config).items() if value is not None}
    scaling = kept.get("yarn_rotary_scaling_factor")
    if scaling is None:
        return 1.0
    return yarn._yarn_get_concentration_factor(
        scaling, kept.get("yarn_mscale", 1.0), kept.get("yarn_mscale_all_dim", 0.0)
    )


def compares_none(config):
    return 1.0 if config.yarn_rotary_scaling_factor <= 1 else 1.3466


def knows_no_mscale(config):
    return 1.0


def divides_wrongly(config):
    return bridges(config) if None in vars(config).values() else 1.3466


def asks_for_more(config):
    return config.yarn_of_this_trainer


@pytest.mark.parametrize("first", ["shim", "trainer"])
@pytest.mark.parametrize(
    ("function", "state"),
    [(bridges, "applied"), (compares_none, "conflict"), (knows_no_mscale, "conflict"), (divides_wrongly, "conflict")]
    + [(asks_for_more, "unknown")],
)
def test_a_function_of_others_is_tried_before_it_is_a_conflict(monkeypatch, function, state, first):
    """In both orders, and `require` raises for none that is right, or that nothing is known of."""
    places = [yarn, *(module for module in (attention,) if hasattr(module, NAME))]
    with contextlib.ExitStack() as stack:
        put = [monkeypatch.setattr] * len(places)
        if first == "shim":
            stack.enter_context(shim.patched(only=[ID], require=[ID]))
        for place, set_it in zip(places, put, strict=True):
            set_it(place, NAME, function)
        if first == "trainer":
            stack.enter_context(shim.patched(only=[ID], require=[ID]))
        assert shim.status()[ID].state == "unknown"
        with pytest.raises(shim.NotMetError) if state == "conflict" else contextlib.nullcontext():
            shim.check()
        assert shim.status()[ID].state == state
        monkeypatch.undo()

"""yarn-none-fields: the factor of YaRN is 1.0 where its field is None, and upstream's everywhere else."""

from types import SimpleNamespace

import pytest
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

import shim
from shim import testing

ID = "yarn-none-fields"
NAME = "_yarn_get_concentration_factor_from_config"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
RIGHT = [(), (4.0, 1.0, 0.5), (0.5, 1.0, 1.0)]
if not testing.release().startswith("0.15."):  # which has no YaRN without both of the other fields
    RIGHT += [(4.0, None, None), (4.0, 1.0, None)]


def config(*values):
    names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    return SimpleNamespace(**dict(zip(names, values, strict=False)))


@needed
@pytest.mark.parametrize("values", RIGHT)
def test_what_stock_does_right_stays(values):
    expected = getattr(yarn, NAME)(config(*values))
    with shim.patched(only=[ID], require=[ID]):
        assert getattr(yarn, NAME)(config(*values)) == getattr(yarn, NAME)(config=config(*values)) == expected


@needed
@pytest.mark.parametrize("values", [(None, None, None), (None, 1.0, 0.5), (None,)])
def test_a_field_that_is_none_counts_as_absent(values):
    with shim.patched(only=[ID], require=[ID]):
        assert getattr(yarn, NAME)(config(*values)) == 1.0


@pytest.mark.skipif(NEEDED, reason="this release needs the patch")
def test_this_release_needs_no_patch():
    """It takes no factor from the config in attention."""
    assert shim.plan()[ID].action in ("upstream", "not-needed")
    assert not hasattr(yarn, NAME)

"""mla-rope-softmax-scale: with plain rotary embeddings the scale of scores is that of a head, and with YaRN stock's."""

import pytest
from needed import needed

import shim
from shim.patches.megatron_core import _proof_mla
from shim.patches.megatron_core.mla_rope_softmax_scale.proof import times_too_large

CELLS = {"0.13.1": "all"}

ID = "mla-rope-softmax-scale"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


@pytest.mark.parametrize("options", [{"rope_type": "yarn"}, {"rotary_scaling_factor": 1.0}], ids=["yarn", "1"])
def test_what_stock_does_right_stays(options):
    stock = times_too_large(**options)
    with shim.patched(only=[ID], require=[ID]):
        assert times_too_large(**options) == stock


@pytest.mark.parametrize("fails", [False, True])
def test_the_config_keeps_its_factor(fails):
    """Also if the layer cannot be built."""
    with shim.patched(only=[ID], require=[ID]), _proof_mla.without_te() as module:
        layer = _proof_mla.build(module)
        config = layer.config
        assert config.rotary_scaling_factor == 40
        if fails:
            with pytest.raises(AttributeError):
                type(layer)(config, None, 1)
            assert config.rotary_scaling_factor == 40

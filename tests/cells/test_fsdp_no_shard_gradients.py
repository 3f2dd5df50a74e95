"""fsdp-no-shard-gradients: ranks that shard nothing sum their gradients, and where stock does, it is left alone."""

from types import SimpleNamespace

import pytest
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.fsdp_no_shard_gradients.proof import buffers_class, reduced
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ID = "fsdp-no-shard-gradients"
pytestmark = needed(ID)


def on_ranks(settings):
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout(ep=2)), shim.patched(only=[ID], require=[ID]):
        return reduced(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"async_op": True}, {"check_for_nan_in_grad": True}], ids=["", "async", "check"]
)
def test_ranks_have_the_mean(ranks2, settings):
    assert ranks2.run(on_ranks, settings) == [[1.5, 1.5]] * 2


def test_a_frozen_group_and_one_that_is_sharded():
    """The first has no buffer. The second is refused, as on stock."""
    config = SimpleNamespace(outer_dp_sharding_strategy="no_shard", check_for_nan_in_grad=False)
    frozen = SimpleNamespace(main_grad_buffer=None)
    sharded = SimpleNamespace(main_grad_buffer=SimpleNamespace(is_data_distributed=True))
    with shim.patched(only=[ID], require=[ID]):
        reduce = buffers_class().all_reduce_gradients
        reduce(SimpleNamespace(parameter_groups=[frozen], ddp_config=config))
        with pytest.raises(AssertionError, match="not sharded"):
            reduce(SimpleNamespace(parameter_groups=[frozen, sharded], ddp_config=config))

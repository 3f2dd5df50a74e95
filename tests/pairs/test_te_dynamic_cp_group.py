"""te-dynamic-cp-group: a layer has its own group again after each batch, and batches without one run as on stock."""

import pytest
import torch
from needed import needed
from torch.utils.checkpoint import checkpoint

import shim
from shim.patches.megatron_core.te_dynamic_cp_group.proof import RANKS, TOKENS, attend, attention, states
from shim.testing.layout import Layout
from shim.testing.proof import Here

CELLS = {"0.19.2+2.20.2": "all"}

ID = "te-dynamic-cp-group"
pytestmark = needed(ID)
HERE = Here(world=RANKS, te=True)
SETTINGS = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")


def settings(layer):
    return [getattr(layer, name) for name in SETTINGS]


def own_settings_stay():
    """After a batch with a group, with none, and one that raises."""
    with attention() as layer:
        own, part = settings(layer), states(torch.distributed.get_rank())
        for row in ({"cp_group": torch.distributed.group.WORLD, "local_cp_size": RANKS}, {"local_cp_size": 1}):
            attend(layer, part, **row)
            assert all(found is right for found, right in zip(settings(layer), own, strict=True))
        with pytest.raises(AssertionError, match="local_cp_size must be == 1"):
            attend(layer, part, local_cp_size=RANKS)
        assert all(found is right for found, right in zip(settings(layer), own, strict=True))
    return True


@pytest.mark.parametrize("layout", [Layout(cp=RANKS), Layout(ep=RANKS)], ids=["cp2", "dp2"])
def test_a_layer_has_its_own_group_again(layout):
    with shim.patched(only=[ID], require=[ID]):
        assert all(HERE.run(own_settings_stay, layout=layout))


def gradients():
    """Of a row that both ranks share, recomputed and not, with a row that each has alone between them."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    own = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
    found = []
    with attention() as layer:
        for recompute in (False, True):
            part = states(2)[own].requires_grad_()
            row = {"cp_group": group, "local_cp_size": RANKS}
            run = checkpoint if recompute else lambda function, *args, **options: function(*args)
            output = run(lambda part, row=row: attend(layer, part, **row), part, use_reentrant=True)
            attend(layer, states(rank), local_cp_size=1)
            output.square().sum().backward()
            found += [output.detach(), part.grad]
    return found


def test_recompute_attends_over_the_group_of_its_batch():
    with shim.patched(only=[ID], require=[ID]):
        for output, gradient, again, recomputed in HERE.run(gradients, layout=Layout(cp=RANKS)):
            assert torch.equal(output, again) and torch.equal(gradient, recomputed)


def ordinary():
    with attention() as layer:
        part = states(torch.distributed.get_rank())
        return attend(layer, part), settings(layer) == settings(layer)


def test_batches_without_a_group_run_as_on_stock():
    stock = HERE.run(ordinary, layout=Layout(cp=RANKS))
    with shim.patched(only=[ID], require=[ID]):
        found = HERE.run(ordinary, layout=Layout(cp=RANKS))
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(found, stock, strict=True))

"""gated-delta-net-norm and mla-query-norm-gradient: a model that needs neither costs no Python call for a layer."""

import contextlib
import importlib

import pytest
from trainings import python_calls

import shim
from shim import testing

ABOUT = ["gated-delta-net-norm", "mla-query-norm-gradient"]
CELLS = {"0.18.2": "all"}

WANTED = [id for id in ABOUT if shim.plan()[id].wanted]
TARGET = shim.plan()["mla-query-norm-gradient"].wiring.targets[0] if "mla-query-norm-gradient" in WANTED else ""
pytestmark = pytest.mark.skipif(not TARGET, reason="this release needs no patch")


def calls_of(model, config, ids):
    """How many Python calls it takes to sum gradients of this model over tensor-parallel ranks."""
    module, _, name = TARGET.partition(":")
    with shim.patched(only=ids, require=ids) if ids else contextlib.nullcontext():
        function = getattr(importlib.import_module(module), name)
        function([model], config)
        return python_calls(lambda: function([model], config))


def beyond_stock(tp):
    """Calls more than stock's for each patch, and for all, of a model of two layers and of one of twelve."""
    from megatron.core import parallel_state

    distributed = importlib.import_module("megatron.core.distributed")
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=tp)):
        assert parallel_state.get_tensor_model_parallel_world_size() == tp
        found = []
        for layers in (2, 12):
            model = testing.build_gpt(num_layers=layers, mtp_num_layers=None)
            wrapped = distributed.DistributedDataParallel(
                model.config, distributed.DistributedDataParallelConfig(), model
            )
            stock = calls_of(wrapped, model.config, [])
            found.append([calls_of(wrapped, model.config, ids) - stock for ids in (*([id] for id in WANTED), WANTED)])
        return found


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_without_such_layers_costs_no_call_for_a_layer(tp):
    with testing.Ranks(tp) as ranks:
        for few, many in ranks.run(beyond_stock, tp):
            assert few == many, (few, many)
            assert max(many) <= 30, many  # for a chunk

"""mtp-tied-checkpoint: the file has the embeddings once, under stock's name; other models are saved as by stock."""

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_optimizer_resume import fused_adam
from shim.patches.megatron_core.mtp_tied_checkpoint.proof import Saved
from shim.testing import Layout
from shim.testing.sharded import load, save

CELLS = {"0.19.2": "all"}

ID = "mtp-tied-checkpoint"
BESIDE = [id for id in (ID, "mtp-without-te") if shim.plan()[id].wanted]
pytestmark = needed(ID)
TWO = Layout(pp=2)


def inside(layout, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=BESIDE, require=[ID]):
        return function(*args)


def sharded(options):
    """What this rank's stage saves: by its name, the name in the file, the place of the part, and which copy it is."""
    model = testing.build_gpt(**{"num_layers": 2, "mtp_num_layers": 1, **options})
    found = model.sharded_state_dict(metadata={})  # without any 0.16 raises
    return {name: (part.key, part.global_offset, part.replica_id) for name, part in found.items() if "weight" in name}


def by_stock(options):
    with testing.megatron_on_cpu(), testing.layout_initialised(TWO), shim.patched(only=["mtp-without-te"]):
        return sharded(options)


def test_the_output_layer_is_a_copy_of_the_embeddings(ranks):
    """As it is without multi-token prediction."""
    tied = {"share_embeddings_and_output_weights": True}
    name, embeddings = "output_layer.weight", "embedding.word_embeddings.weight"
    first, last = ranks[2].run(inside, TWO, sharded, tied)
    assert last[name] == ranks[2].run(by_stock, {**tied, "mtp_num_layers": None})[1][name]
    assert last[name] == last[embeddings] != first[embeddings]
    assert name not in first and last[name][0] == embeddings


@pytest.mark.parametrize(
    "options",
    [
        {"share_embeddings_and_output_weights": False},
        {"share_embeddings_and_output_weights": True, "mtp_num_layers": None},
    ],
    ids=["untied", "without mtp"],
)
def test_other_models_are_saved_as_by_stock(ranks, options):
    assert ranks[2].run(inside, TWO, sharded, options) == ranks[2].run(by_stock, options)


class Optimized(Saved):
    """A stage with its optimizer, after a step."""

    def __init__(self, seed):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        super().__init__(True, seed)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(self.stage.config, settings, self.stage)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)
        self.optimizer = testing.cpu.optimizer_on_cpu(config, [wrapped])
        for name, weight in self.stage.named_parameters():
            weight.main_grad.fill_(float(seed) * ("layernorm" not in name))
        self.optimizer.step()

    def sharded_state_dict(self):
        model, form = self.stage.sharded_state_dict(), {"distrib_optim_sharding_type": "fully_reshardable"}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, metadata=form)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])

    def states(self):
        inner = getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0].optimizer
        return [inner.state[weight]["exp_avg"].clone() for group in inner.param_groups for weight in group["params"]]


def optimizer_saved(directory):
    with fused_adam():
        stage = Optimized(seed=7)
        save(stage, directory)
        return stage.states()


def optimizer_loaded(directory):
    with fused_adam():
        stage = Optimized(seed=8)
        load(stage, directory)
        return stage.states()


def test_the_optimizer_comes_along(ranks, tmp_path):
    saved = ranks[2].run(inside, TWO, optimizer_saved, str(tmp_path))
    loaded = ranks[2].run(inside, TWO, optimizer_loaded, str(tmp_path))
    for right, found in zip(saved, loaded, strict=True):
        assert right and all(torch.equal(*pair) for pair in zip(right, found, strict=True))

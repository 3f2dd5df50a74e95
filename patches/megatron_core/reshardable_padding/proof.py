"""Proof of reshardable-padding."""

from __future__ import annotations

import tempfile

import torch

from shim.patches.megatron_core._proof_optimizer_resume import (
    STEPS,
    Training,
    apart,
    fused_adam,
    save_after,
    weights_after,
    weights_resumed,
)
from shim.testing.layout import Layout
from shim.testing.proof import Here, proof

FULLY = {"distrib_optim_sharding_type": "fully_reshardable"}


def wrong_moments(directory: str) -> int:
    """Weights whose first moment is another one after saving and loading."""
    with fused_adam():
        saved = Training(FULLY).train().save(directory).states()
        loaded = Training(FULLY, seed=8).load(directory).states()
    assert len(saved) == len(loaded)
    return sum(not torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in zip(saved, loaded, strict=True))


@proof("{:.0f} of 19 weights with the moments of others", right="the moments that were saved")
def a_reshardable_checkpoint_has_the_moments(here: Here) -> int:
    """A fully reshardable checkpoint has the optimizer's state of most weights displaced.

    To reproduce: wrap a GPTModel of two layers, hidden size 24, in DistributedDataParallel with
    `DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=500)`. Train
    three steps, and save `optimizer.sharded_state_dict(model.sharded_state_dict(), metadata={
    "distrib_optim_sharding_type": "fully_reshardable"})` by dist_checkpointing.save. Load it into another optimizer,
    and compare exp_avg. One rank is enough. On a CPU, `Tensor.type()` has to answer as on a GPU, and Adam has to keep
    the number of steps in its groups, as in Apex.

    get_parameter_state_dp_zero leaves out the padding at the end of each bucket. sharded_param_state_fully_reshardable
    cuts out the weights by their places in the buffer, where that padding counts. So a weight of a later bucket begins
    with elements of its own that stand further behind, and ends with those of its neighbour, or with zeros. The main
    weights and exp_avg_sq are displaced in the same way. Fixed by Megatron-LM pull request 5077.
    """
    with tempfile.TemporaryDirectory() as directory:
        return here.run(wrong_moments, directory)[0]


@proof("weights off by {:.1e} three steps after a resume", right="bit-equal", ranks=2)
def a_training_resumes_from_a_reshardable_checkpoint(here: Here) -> float:
    """A training that resumes from a fully reshardable checkpoint goes on with other weights.

    To reproduce: train low-rank adapters of a frozen GPTModel as above, with several buckets and two data-parallel
    ranks. Save after three steps with the sharding "fully_reshardable". Load the checkpoint on one rank, train three
    more steps, and compare the weights with those of six steps without a break. All ranks have the same row.

    The main weights of the checkpoint are displaced, and a step writes them into the model. The weights should be the
    same, bit for bit. Fixed by Megatron-LM pull request 5077.
    """
    layout = Layout(ep=here.world)
    settings = {"lora": True, "bucket": 200}
    with tempfile.TemporaryDirectory() as directory:
        here.run(save_after, STEPS, directory, FULLY, settings, layout=layout)
        resumed = here.run(weights_resumed, STEPS, directory, FULLY, {**settings, "seed": 7})[0]
    return apart(resumed, here.run(weights_after, 2 * STEPS, FULLY, settings)[0])

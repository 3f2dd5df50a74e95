"""Proof of dp-reshardable-empty-bucket."""

from __future__ import annotations

import tempfile
from typing import Any

from shim.patches.megatron_core._proof_optimizer_resume import (
    BY_DATA,
    STEPS,
    apart,
    save_after,
    weights_after,
    weights_resumed,
)
from shim.testing.layout import Layout
from shim.testing.proof import Here, proof

# Each weight has a bucket. Those of 24 elements are filled up to 128, so that the second of two ranks has nothing.
SETTINGS: dict[str, Any] = {"bf16": True, "lora": True, "norms": True, "bucket": 20}
SAYS = "AssertionError: empty bucket encountered"


def resumed_apart(here: Here, saving: int, loading: int) -> float:
    """How far weights are from those of a training without a break; saved and loaded by so many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        here.run(save_after, STEPS, directory, BY_DATA, SETTINGS, layout=Layout(ep=saving))
        resumed = here.run(weights_resumed, STEPS, directory, BY_DATA, SETTINGS, layout=Layout(ep=loading))
    truth = here.run(weights_after, 2 * STEPS, BY_DATA, {"seed": 7, **SETTINGS})[0]
    return max(apart(weights, truth) for weights in resumed)


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=rf"^ModelError: saving, {SAYS}",
    ranks=2,
)
def ranks_without_a_weight_of_a_bucket_resume(here: Here) -> float:
    """A dp_reshardable checkpoint cannot be saved if a rank has no weight of a bucket.

    To reproduce: train low-rank adapters and norms of a GPTModel of two layers, hidden size 24, in bf16 with
    DistributedDataParallel on two ranks, with `use_distributed_optimizer=True, overlap_grad_reduce=True,
    bucket_size=20`. Save `optimizer.sharded_state_dict(model.sharded_state_dict(), metadata={
    "distrib_optim_sharding_type": "dp_reshardable"})` by dist_checkpointing.save. On a CPU, `Tensor.type()` has to
    answer as on a GPU, and Adam has to keep the number of steps in its groups, as in Apex.

    The bucket of a norm has 24 elements and is filled up to 128, and the second rank's share begins at 64. So its list
    of weights is empty, which sharded_param_state_dp_reshardable asserts not to happen. A training that was saved after
    three steps, and goes on for three more, should have the weights of six steps without a break.
    """
    return resumed_apart(here, here.world, here.world)


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=rf"^ModelError: loading, {SAYS}",
    ranks=2,
)
def a_checkpoint_of_one_rank_resumes_on_more(here: Here) -> float:
    """A dp_reshardable checkpoint cannot be loaded by more ranks, if one of them has no weight of a bucket.

    To reproduce: as above, but save on one rank, which has something of each bucket, and load on two.

    A load also asks sharded_param_state_dp_reshardable what there is, which raises the same AssertionError. All ranks
    should have the weights of a training without a break.
    """
    return resumed_apart(here, 1, here.world)

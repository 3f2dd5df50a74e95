"""Proof of optimizer-sharding-default."""

from __future__ import annotations

import tempfile

from shim.patches.megatron_core._proof_optimizer_resume import STEPS, apart, save_after, weights_after, weights_resumed
from shim.testing.layout import Layout
from shim.testing.proof import Here, proof


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=r"^ModelError: saving, CheckpointingException: ShardedTensor.flattened_range is not supported",
    ranks=2,
)
def a_training_resumes_without_a_named_sharding(here: Here) -> float:
    """The default sharding of the distributed optimizer is one that cannot be saved.

    To reproduce: train low-rank adapters of a frozen GPTModel in bf16 with DistributedDataParallel and
    get_megatron_optimizer, `use_distributed_optimizer=True`, on two data-parallel ranks. Save
    `optimizer.sharded_state_dict(model.sharded_state_dict())` by dist_checkpointing.save. On a CPU, `Tensor.type()` has
    to answer as on a GPU, and Adam has to keep the number of steps in its groups, as in Apex.

    Without metadata, sharded_state_dict takes "fully_sharded_model_space", which makes shards with a flattened_range.
    Since 0.16 dist_checkpointing raises a CheckpointingException for them. The default should be one that works. Then a
    training that was saved after three steps, and goes on for three more on one rank, has the weights of six steps
    without a break, bit for bit.
    """
    settings = {"lora": True, "bf16": True}
    with tempfile.TemporaryDirectory() as directory:
        here.run(save_after, STEPS, directory, None, settings, layout=Layout(ep=here.world))
        resumed = here.run(weights_resumed, STEPS, directory, None, {**settings, "seed": 7})[0]
    return apart(resumed, here.run(weights_after, 2 * STEPS, None, settings)[0])

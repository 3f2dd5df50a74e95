"""Proofs of fp32-weight-states."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

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

# Biases in bf16 and norms in fp32, none of which decays, are one group.
MIXED: dict[str, Any] = {
    "seed": 7,
    "bf16": True,
    "mixed": True,
    "add_bias_linear": True,
    "saved": False,
    "bucket": None,
}


def metadata() -> Mapping[str, Any] | None:
    """Of a checkpoint that this release can write and load with weights in fp32."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable"):
        return {"distrib_optim_sharding_type": "fully_reshardable"}
    return None


@proof(
    "weights off by {:.1e} three steps after a resume",
    right="bit-equal",
    defect="crash",
    crashes=r"^ModelError: saving, (RuntimeError|CheckpointingException|AssertionError): |^CheckpointingException: ",
    ranks=2,
)
def a_training_with_some_weights_in_fp32_resumes(here: Here) -> float:
    """A checkpoint of the distributed optimizer cannot be saved if some weights of a bf16 model are in fp32.

    To reproduce: train a GPTModel in bf16 with `add_bias_linear=True`, whose norms are in fp32, with
    DistributedDataParallel and get_megatron_optimizer, `use_distributed_optimizer=True`. Save
    `optimizer.sharded_state_dict(...)` by dist_checkpointing.save. On a CPU, `Tensor.type()` has to answer as on a GPU,
    and Adam has to keep the number of steps in its groups, as in Apex.

    `_build_model_and_main_param_groups` puts weights in fp32 in front, and `model_param_group_index_map` has the order
    of the buffers. So the states of a weight have the size of another's. A training that was saved after three steps on
    two ranks, and goes on for three more on one, should have the weights of six steps without a break.
    """
    with tempfile.TemporaryDirectory() as directory:
        how = metadata_here(here)
        here.run(save_after, STEPS, directory, how, MIXED, layout=Layout(ep=here.world))
        resumed = here.run(weights_resumed, STEPS, directory, how, MIXED)[0]
    return apart(resumed, here.run(weights_after, 2 * STEPS, how, MIXED)[0])


def metadata_here(here: Here) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = here.run(metadata)[0]
    return found


def of_another_weight() -> int:
    """Weights whose number in the group of the inner optimizer is another's."""
    wrong = 0
    with fused_adam():
        optimizer: Any = Training(None, **MIXED).optimizer
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            for weight, (group, order) in each.model_param_group_index_map.items():
                trained = each.optimizer.param_groups[group]["params"][order]
                main = getattr(weight, "main_param", None)
                wrong += trained is not main if main is not None else trained.data_ptr() != weight.data_ptr()
    return wrong


@proof("states of {:.0f} of 27 weights are another's", right="each weight has its own states")
def each_weight_has_its_own_states(here: Here) -> int:
    """The distributed optimizer takes the states of a weight for those of another if some weights are in fp32.

    To reproduce: build the optimizer as above. For each weight of `optimizer.model_param_group_index_map`, compare
    `optimizer.optimizer.param_groups[group_index]["params"][group_order]` with `weight.main_param`, or with the weight
    if it is in fp32.

    If sizes are equal, a checkpoint has the states under the names of others, in silence. From 0.12 to 0.19.
    """
    found: int = here.run(of_another_weight)[0]
    return found

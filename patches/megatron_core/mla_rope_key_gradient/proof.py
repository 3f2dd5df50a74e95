"""Proof of mla-rope-key-gradient."""

from __future__ import annotations

from importlib import import_module

from shim.patches.megatron_core._proof_mla import MLA, training_error
from shim.testing.proof import Here, proof


def recomputes_the_projections() -> bool:
    """Whether this release can discard the outputs of the up projections, and compute them again in backward."""
    made = (vars(owner).get("__init__") for owner in import_module(MLA).MLASelfAttention.__mro__)
    return any("recompute_up_proj" in code.co_names for init in made if (code := getattr(init, "__code__", None)))


@proof("weights off by {:.1e}", bound=1e-4, ranks=2)
def a_column_parallel_projection_trains_as_on_one_rank(here: Here) -> float:
    """Multi-latent attention trains its key projection wrongly under tensor parallelism.

    To reproduce: on two tensor-parallel ranks wrap the self attention of
    `get_gpt_layer_local_spec(multi_latent_attention=True)` in DistributedDataParallel. Run forward, backward,
    finalize_model_grads and a step of SGD, some times, with `sequence_parallel` on and off, and with "mla_up_proj"
    among the recomputed modules. Compare the weights with those of one rank that has all heads.

    All heads share one rotary key, `k_pos_emb`, and a rank has some of the heads. So the gradient of `k_pos_emb` is the
    sum over ranks. gather_from_tensor_model_parallel_region gives each rank its columns of its local gradient, without
    a sum. The rows of linear_kv_down_proj for the rotary key get the gradient of the heads of one rank, and the
    gradient of the hidden states is also wrong.

    Right is what one rank trains: the gradient of k_pos_emb is to be summed over tensor-parallel ranks. From 0.12 to
    0.20.
    """
    recomputed = {
        "sequence_parallel": False,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    }
    cases = [recomputed] if here.run(recomputes_the_projections)[0] else []
    return training_error(here, {"sequence_parallel": False}, {"sequence_parallel": True}, *cases)


@proof("weights off by {:.1e}", bound=1e-4, ranks=2, variants=("v0_13",))
def a_duplicated_projection_trains_alike_on_all_ranks(here: Here) -> float:
    """Copies of multi-latent attention's key projection drift apart on tensor-parallel ranks.

    To reproduce: as for the column-parallel projection, with TELinear for linear_q_down_proj and linear_kv_down_proj,
    as Transformer Engine's layer specs have it, and with `sequence_parallel=False`. Here a linear layer in torch
    stands for TELinear.

    Each rank has the whole linear_kv_down_proj. Its gradient for the rotary key is that of the rank's own heads, and is
    not summed. With sequence parallelism k_pos_emb is gathered over ranks, and the backward of that sums: it is right.

    Right is the same weight on all ranks, that of one rank. From 0.14, which has such projections, to 0.20.
    """
    return training_error(here, {"sequence_parallel": False}, duplicated=True)

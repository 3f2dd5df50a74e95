"""Proof of mla-query-norm-gradient."""

from __future__ import annotations

from shim.patches.megatron_core._proof_mla import training_error
from shim.testing.proof import Here, proof


@proof("weights off by {:.1e}", bound=1e-4, ranks=2, beside=("mla-rope-key-gradient",))
def the_norm_of_the_query_trains_as_on_one_rank(here: Here) -> float:
    """The norm of multi-latent attention's compressed query gets a gradient that is too large under tensor parallelism.

    To reproduce: on two tensor-parallel ranks wrap the self attention of
    `get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True)` in DistributedDataParallel, with
    `qk_layernorm=True` and `sequence_parallel=False`. Run forward, backward, finalize_model_grads and a step of SGD,
    some times. Compare `q_layernorm.weight` with that of one rank that has all heads.

    Both ranks have the whole compressed query, so the gradient of its norm is the same on both. finalize_model_grads
    sums it, since the name has "q_layernorm" in it: it is twice that of one rank, and four times on four ranks. The
    same with sequence parallelism is right, where each rank has some of the tokens.

    Right is what one rank trains. Both sides run with mla-rope-key-gradient, because without it the projection of the
    key also trains wrongly.
    """
    return training_error(here, {"sequence_parallel": False}, {"sequence_parallel": True}, qk_layernorm=True)

"""Who is outside where patches of the shipped matrix share a target. A patch further down in the file is outside."""

from itertools import combinations

from shim._matrix.load import load_matrix

MTP = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer."
RANDOM = "megatron.core.tensor_parallel.random:"

# (inside, outside): the targets they share
OUTSIDE = {
    # The checkpoint runs its function again, so what packed rows need has to be in there. _checkpointed_forward of
    # mtp-recompute does the whole job itself, and calls that of mtp-packed-sequences no more.
    ("mtp-packed-sequences", "mtp-recompute"): {MTP + "forward", MTP + "_checkpointed_forward"},
    # config-override only marks the function and calls it: either order does.
    ("fp8-fp4-recompute", "config-override"): {
        RANDOM + "CheckpointFunction.forward",
        RANDOM + "CheckpointWithoutOutput.checkpoint",
    },
    # The input has to require a gradient before a checkpoint takes it: either order does.
    ("fp8-fp4-recompute", "frozen-recompute"): {
        "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward"
    },
    # Both take the function's place, and chunked-logprob smooths labels as label-smoothing does: either order does.
    ("label-smoothing", "chunked-logprob"): {
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
    },
    # Both take the function's place, and only that of rope-fusion tells from its values which rows a table has.
    ("rope-thd", "rope-fusion"): {"megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"},
}


def test_every_pair_that_shares_a_target_is_known_with_its_order():
    """On some supported release; whoever adds a pair, or moves a patch in the file, has to say who is outside."""
    matrix = load_matrix()
    found = {}
    for distribution, releases in matrix.supported.items():
        for release in releases:
            on = {}
            for id, entry in matrix.patches.items():
                pin = matrix.pins[distribution][release].get(id)
                if pin is not None and pin.variant is not None:
                    for target in entry.variants[pin.variant].targets:
                        on.setdefault(target, []).append(id)
            for target, ids in on.items():
                for pair in combinations(ids, 2):
                    found.setdefault(pair, set()).add(target)
    assert found == OUTSIDE

"""This rank's share of the embeddings of a whole row, as upstream's embedding gives it under sequence parallelism."""

from __future__ import annotations

from typing import Any


def row_share(embeddings: Any, group: Any, config: Any) -> Any:
    """[s, b, h] of [TP s, b, h].

    group: of tensor parallelism, or None for that of parallel_state, as modules of older releases have none. With
        clone_scatter_output_in_embedding the share is a copy, so that the whole row is not kept for backward.
    """
    from megatron.core.tensor_parallel import mappings

    share = mappings.scatter_to_sequence_parallel_region(embeddings, *(() if group is None else (group,)))
    return share.clone() if config.clone_scatter_output_in_embedding else share


def ranks_of(group: Any) -> tuple[int, int]:
    """The number of ranks in the group, and that of this one. group: as of `row_share`."""
    from megatron.core import parallel_state

    group = group or parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()

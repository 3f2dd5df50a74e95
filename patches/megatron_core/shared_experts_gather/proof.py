"""Proofs of shared-experts-gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.testing import Layout
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "share_embeddings_and_output_weights": False,
}
ROWS, TOKENS = 4, 8
OVERWRITTEN = r"^RuntimeError: Output 0 of _GatherFromSequenceParallelRegion is a view"


def rows_of_rank() -> Tensor:
    """What this data-parallel rank has of the rows."""
    from megatron.core import parallel_state

    rows = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]


def losses(trained: bool = False) -> Tensor:
    """The loss of each token, [rows, s], of this rank. trained: whether with a step's backward."""
    from megatron.core import parallel_state

    cut = parallel_state.get_tensor_model_parallel_world_size() > 1
    with eager():
        model: Any = testing.build_gpt(**MODEL, sequence_parallel=cut)
        rows = rows_of_rank()
        with torch.set_grad_enabled(trained):
            found: Tensor = model(rows, torch.arange(TOKENS).expand_as(rows), None, labels=rows)
        if trained:
            found.mean().backward()
    return found.detach()


def error(here: Here, layout: Layout, trained: bool) -> float:
    """How far the losses of the first rank are from those of one rank alone."""
    truth = here.run(losses)[0]
    found = here.run(losses, trained, layout=layout)[0]
    return float((found - truth[: len(found)]).abs().max())


@proof("losses off by {:.1e}", bound=1e-5, ranks=2, defect="crash", crashes=OVERWRITTEN)
def shared_experts_train_over_tensor_parallel_ranks(here: Here) -> float:
    """A mixture of experts with shared experts cannot be trained over tensor-parallel ranks with "allgather".

    To reproduce: on two tensor-parallel ranks with `sequence_parallel=True` build a GPTModel with `num_moe_experts=4`,
    `moe_shared_expert_intermediate_size=32` and `moe_token_dispatcher_type="allgather"`, which is the default, and run
    forward and backward.

    `MoEAllGatherTokenDispatcher.token_dispatch` gathers with `use_global_buffer=True`. `MoELayer.experts_compute` runs
    the shared experts before `dispatch_postprocess`, and their first layer gathers into the same buffer. Right are the
    losses of one rank. In 0.13 and 0.14; 0.15 runs shared experts first.
    """
    return error(here, Layout(tp=2, sequence_parallel=True), True)

"""Proof of global-aux-loss-scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shim.patches.megatron_core._proof_router_losses import GLOBAL, ROWS, model_of, of_routers, off_by, step
from shim.testing import Layout
from shim.testing.proof import CannotRunError, Here, proof

OPTIONS: dict[str, Any] = {**GLOBAL, "moe_token_dispatcher_type": "allgather"}


def gradient(options: Mapping[str, Any], padding: Sequence[int], rows: int) -> Tensor:
    """The gradients of all routers after a step with this many rows in a microbatch."""
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(TopKRouter, "_apply_global_aux_loss"):
        raise CannotRunError("this release has no global auxiliary loss")
    wrapped = model_of(options)
    step(wrapped, padding, rows)
    return of_routers(wrapped)


@proof("gradient of routers off by {:.1e}", bound=1e-5, ranks=2, options={"sum_over_dp": True})
def two_replicas_balance_as_hard_as_one(here: Here) -> float:
    """The gradient of MoE's global auxiliary loss is too small by the number of data-parallel ranks.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="global_aux_loss"` and
    `moe_aux_loss_coeff=0.1`, in DistributedDataParallel. Run a step of `get_forward_backward_func()` with
    `finalize_model_grads` on a microbatch of two rows, and a loss function that returns zero, so that the gradient of
    the routers is that of their own loss alone. Do the same on two data-parallel ranks, each with one of the rows. The
    gradient is half as large.

    The loss counts the tokens of all ranks, and each rank has the part of its own tokens. Gradients are averaged over
    data-parallel ranks. Right is the gradient of one rank with all tokens.

    From 0.15 to 0.20. Megatron-LM issue 3672 is open.
    """
    truth = here.run(gradient, OPTIONS, (), ROWS)[0]
    found = here.run(gradient, OPTIONS, (), ROWS // here.world, layout=Layout(ep=here.world))
    return max(off_by(mine, truth) for mine in found)

"""Proofs of biased-mlp-recompute."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

MODEL: dict[str, Any] = {"num_layers": 2, "mtp_num_layers": None, "add_bias_linear": True}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
MOST = 12


class _TooOftenError(Exception):
    """Ends a backward that does not end."""


def loss_of(model: Any) -> Tensor:
    row = torch.arange(16)[None]
    losses: Tensor = model(row, row, None, labels=row.roll(-1, 1))
    return losses.mean()


def runs_of_an_mlp() -> int:
    """How often the last layer's MLP runs in a step; it is stopped at some number."""
    model = testing.build_gpt(**MODEL, **RECOMPUTE)
    runs = 0

    def count(module: Any, inputs: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == MOST:
            raise _TooOftenError

    handle = model.decoder.layers[-1].mlp.register_forward_pre_hook(count)  # type: ignore[union-attr, index]
    with handle, contextlib.suppress(_TooOftenError):
        loss_of(model).backward()
    return runs


@proof("the MLP runs {:.0f} times in a step", right="twice: forward and one recompute", bound=2, defect="hang")
def backward_through_a_biased_mlp_ends(here: Here) -> int:
    """Backward never ends if an MLP with biases is recomputed.

    To reproduce: build a GPTModel with `add_bias_linear=True`, `recompute_granularity="selective"` and
    `recompute_modules=["mlp"]`, and run forward and backward. The proof stops the last layer's MLP when it runs for the
    twelfth time; stock goes on until there are no threads or no memory left.

    `MLP.forward` returns `linear_fc2.bias`, and `CheckpointFunction.forward` returns it as its own output, so autograd
    gives the parameter a grad_fn. In backward the gradient of what the recompute returned, the same parameter, leads
    to `CheckpointFunction.backward` again. Right is one recompute. From 0.12 to 0.19.
    """
    found: int = here.run(runs_of_an_mlp)[0]
    return found


def frozen_biases_with_a_gradient() -> int:
    model = testing.build_gpt(**MODEL, **RECOMPUTE)
    testing.add_lora(model)
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    loss_of(model)
    return sum(weight.requires_grad for weight in frozen)


@proof("{:.0f} frozen biases require a gradient after forward", right="none does", defect="hang")
def a_frozen_bias_stays_frozen(here: Here) -> int:
    """A frozen bias requires a gradient after its MLP was recomputed.

    To reproduce: build a GPTModel of two layers with `add_bias_linear=True`, `recompute_granularity="selective"` and
    `recompute_modules=["mlp"]`, freeze its weights, and add adapters. After a forward the biases of both `linear_fc2`
    require a gradient, because `CheckpointFunction` returned them, and backward would not end. Right is that none does.
    From 0.12 to 0.19.
    """
    found: int = here.run(frozen_biases_with_a_gradient)[0]
    return found

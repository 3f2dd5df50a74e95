"""Proofs of dsa-indexer-loss-scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.proof import CannotRunError, Here, proof

ROWS, WIDTH = 4, 8


class Layer(torch.nn.Module):
    """Stands for a layer with DSAttention: a weight, and an indexer whose loss is attached to the output."""

    def __init__(self, config: Any, scaler: Any) -> None:
        super().__init__()
        self.config = config
        self.model_type = import_module("megatron.core.enums").ModelType.encoder_or_decoder
        self._scaler = scaler
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.indexer = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """[b, h] -> [b, h]."""
        output, target = x @ self.weight, (x @ self.weight).detach().softmax(-1)
        log_probabilities = (x @ self.indexer).log_softmax(-1)
        loss = torch.nn.functional.kl_div(log_probabilities, target, reduction="batchmean")
        attached: Tensor = self._scaler.apply(output, loss)
        return attached

    def set_input_tensor(self, input_tensor: Any) -> None: ...


def gradients(microbatches: int, grad_scale_func: Callable[[Tensor], Tensor] | None = None, **overrides: Any) -> Tensor:
    """The gradients of both weights, [2, h, h], in a step on ROWS rows in so many microbatches."""
    name = "megatron.core.transformer.experimental_attention_variant.dsa"
    need_option("dsa_indexer_topk", "DSA")
    if find_spec(name.rpartition(".")[0]) is None or find_spec(name) is None:
        raise CannotRunError("DSA of this release is in another module")
    scaler = import_module(name).DSAIndexerLossAutoScaler
    schedules = import_module("megatron.core.pipeline_parallel.schedules")
    config: Any = testing.build_gpt(mtp_num_layers=None, num_layers=1).config
    config.experimental_attention_variant = "dsa"  # the constructor would build its attention, which needs a GPU
    config.grad_scale_func = grad_scale_func
    for field, value in overrides.items():
        setattr(config, field, value)
    layer: Any = Layer(config, scaler)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def forward_step(rows: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        return model(next(rows)), lambda output: (output.square().mean(), {})

    before, scaler.main_loss_backward_scale = scaler.main_loss_backward_scale, None
    try:
        schedules.forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(data.chunk(microbatches)),
            model=layer,
            num_microbatches=microbatches,
            seq_length=WIDTH,
            micro_batch_size=ROWS // microbatches,
        )
    finally:
        scaler.main_loss_backward_scale = before
    return torch.stack([layer.weight.grad, layer.indexer.grad])


def error(found: Tensor, right: Tensor) -> float:
    """The largest error of a weight's gradient, in units of its norm."""
    return float(((found - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)).max())


SAYS = "gradient off by {:.1e}"


@proof(SAYS, bound=1e-5)
def the_loss_of_an_indexer_over_four_microbatches(here: Here) -> float:
    """The gradient of DSA's indexer grows with the number of microbatches.

    To reproduce: with `experimental_attention_variant="dsa"` run a step of `forward_backward_no_pipelining` on four
    rows, once as one microbatch and once as four. Compare the gradients of the weights, and those of the indexer.

    Those of the model are equal, for the schedule divides the loss by the number of microbatches. Those of the indexer
    are four times as large: the schedules set the scales of the losses of MoE and multi-token prediction, and not that
    of DSAIndexerLossAutoScaler, which stays 1. Seen in 0.16 to 0.18; 0.19 sets it.

    DSAttention needs a GPU. A layer stands in for it that attaches its loss in the same way, by
    `DSAIndexerLossAutoScaler.apply(output, indexer_loss)`.
    """
    return error(here.run(gradients, 4)[0], here.run(gradients, 1)[0])


@proof(SAYS, bound=1e-5)
def the_loss_of_an_indexer_under_a_loss_scaler(here: Here) -> float:
    """The loss of DSA's indexer is not scaled under fp16.

    To reproduce: as above, with one microbatch and a loss scaler, `config.grad_scale_func=lambda loss: loss * 1024`.
    Compare the gradients, over 1024, with those without a scaler.

    Those of the indexer are 1024 times too small, for the schedules do not give the scale to DSAIndexerLossAutoScaler.
    Seen in 0.16 to 0.18; 0.19 gives it.
    """
    scaled = here.run(gradients, 1, lambda loss: loss * 1024)[0]
    return error(scaled / 1024, here.run(gradients, 1)[0])

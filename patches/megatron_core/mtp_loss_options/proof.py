"""Proofs of mtp-loss-options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32}


def gradients(**options: Any) -> dict[str, Tensor]:
    """The gradient of each weight, by name, of a step on a row of eight tokens."""
    model = testing.build_gpt(**SIZES, **options)
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    row = torch.arange(8)[None]
    model(row, row, None, labels=row.roll(-1)).mean().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def gradients_of_mtp_alone(**options: Any) -> dict[str, Tensor]:
    """Those of the weights of multi-token prediction, with a main model that is frozen."""
    model = testing.build_gpt(**SIZES, **options)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith("mtp."))
    return gradients_of(model)


def different(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    """How many weights of `right` have another gradient in `found`."""
    return sum(name not in found or not torch.equal(found[name], grad) for name, grad in right.items())


def wrong_gradients() -> int:
    """Of a model with tied embeddings and one without, with two depths of multi-token prediction."""
    wrong = 0
    for tied in (True, False):
        which = {"share_embeddings_and_output_weights": tied}
        found = gradients(mtp_num_layers=2, **which)
        wrong += different(found, gradients(mtp_num_layers=None, **which))
        wrong += different(found, gradients_of_mtp_alone(mtp_num_layers=2, **which))
    return wrong


def wrong_gradients_of_the_main_model() -> int:
    """The same for the weights of the main model alone."""
    wrong = 0
    for tied in (True, False):
        which = {"share_embeddings_and_output_weights": tied}
        found = gradients(mtp_num_layers=2, **which)
        wrong += different(found, gradients(mtp_num_layers=None, **which))
        wrong += sum(bool(grad.any()) for name, grad in found.items() if name.startswith("mtp."))
    return wrong


@proof("{:.0f} gradients are others", right="bit-equal", defect="missing", options={"detach": True})
def multi_token_prediction_leaves_the_main_model_alone(here: Here) -> int:
    """Multi-token prediction cannot be trained without training the main model on its loss, before 0.19.

    To reproduce: build a GPTModel with `mtp_num_layers=2` and one with `mtp_num_layers=None`, with the same weights,
    and compare the gradients of the weights that both have. All are others: the loss of multi-token prediction
    reaches the main model by the hidden states, the embedding and the output layer.

    Reinforcement learning trains multi-token prediction for speculative decoding, and must leave the policy alone. The
    main model's gradients should then be those without multi-token prediction, and those of multi-token prediction the
    ones that it has behind a frozen main model. 0.19 has a field of the config for that, `mtp_detach_heads`
    (Megatron-LM pull request 3456). It is off by default, so stock is as before here.
    """
    found: int = here.run(wrong_gradients)[0]
    return found


@proof("{:.0f} gradients are others", right="bit-equal", defect="missing", options={"skip_loss": True})
def the_loss_of_multi_token_prediction_can_be_left_out(here: Here) -> int:
    """The loss of multi-token prediction cannot be left out by a trainer that computes another loss.

    To reproduce: build a GPTModel with `mtp_num_layers=2` and one with `mtp_num_layers=None`, with the same weights,
    and compare the gradients of the weights that both have. The model computes the loss of multi-token prediction
    whenever it has labels, and adds it to its own in backward.

    `mtp_loss_scaling_factor=0` takes the gradient away, and still computes logits of each depth. Right would be no
    gradient, and no logits.
    """
    found: int = here.run(wrong_gradients_of_the_main_model)[0]
    return found

"""Proof of fp32-residual."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

TOKENS, LAYERS = 8, 4


def _layer_norm(norm: torch.nn.LayerNorm, hidden: Tensor) -> Tensor:
    weight, bias = norm.weight.float(), norm.bias.float()
    normed = torch.nn.functional.layer_norm(hidden.float(), norm.normalized_shape, weight, bias, norm.eps)
    return normed.to(norm.weight.dtype)


@contextlib.contextmanager
def norms_as_of_apex() -> Iterator[None]:
    """Torch's LayerNorm takes fp32 and gives the dtype of its weights, as those of Apex and Transformer Engine do."""
    with mock.patch.object(torch.nn.LayerNorm, "forward", _layer_norm):
        yield


def build(**overrides: Any) -> Any:
    """A model with weights in bf16 and, unless said otherwise, residuals in fp32."""
    half = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    model: Any = testing.build_gpt(
        **{"num_layers": LAYERS, "mtp_num_layers": None, "fp32_residual_connection": True, **half, **overrides}
    )
    return model.to(model.config.params_dtype)  # torch's norms do not ask the config


def rounding() -> float:
    """How far the residual stream behind the last layer is from the sum in fp64 of what has been added to it."""
    stream: list[Tensor] = []
    added: list[Tensor] = []
    with norms_as_of_apex():
        model = build()
        model.decoder.layers[0].register_forward_pre_hook(
            lambda layer, args, kwargs: stream.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda layer, args, output: stream.append(output[0]))
            for branch in (layer.self_attention, layer.mlp):
                branch.register_forward_hook(lambda branch, args, output: added.append(output[0]))
        row = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        model(row, torch.arange(TOKENS)[None], None, labels=row.roll(-1, 1))
    expected = stream[0].double() + torch.stack(added).double().sum(0)
    return float((stream[-1].double() - expected).norm() / expected.norm())


@proof("residuals off by {:.1e}", bound=1e-6)
def residuals_stay_in_fp32(here: Here) -> float:
    """fp32_residual_connection has no effect behind the first layer: residuals are rounded to bf16.

    To reproduce: run a GPTModel with `params_dtype=torch.bfloat16` and `fp32_residual_connection=True`, and look at the
    dtype of what each layer returns. It is bf16, although the embedding gives fp32.

    _bias_dropout_add_func casts the residual to the dtype of what is added, which is bf16. So each addition rounds the
    whole stream, and the sum of all layers loses what fp32 was asked for.

    Right is the sum in fp32 of the embedding and of what attention and MLP return. What is measured is the distance of
    the last layer's output from that sum in fp64. The norms are stood in: they give the dtype of their weights, as
    Apex's do.

    From 0.12 to 0.16. From 0.17 on what is added is cast to fp32, by pull request 3504.
    """
    found: float = here.run(rounding)[0]
    return found

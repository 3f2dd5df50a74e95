"""Proof of fp32-residual."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof
from shim.testing.schedules import mean_of_row, run_microbatches

TOKENS, LAYERS, STAGES = 8, 4, 2


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


# What a layer has seen in each of its forward passes: its input, what attention and MLP have returned, its output.
Passes = dict[int, list[Tensor]]


def watch(layers: Iterable[Any]) -> Passes:
    """What these layers see from now on, by the number of the layer."""
    found: Passes = {}
    for layer in layers:
        seen = found[layer.layer_number] = []
        layer.register_forward_pre_hook(_noting_input(seen), with_kwargs=True)
        for part in (layer.self_attention, layer.mlp, layer):
            part.register_forward_hook(_noting_output(seen))
    return found


def _noting_input(seen: list[Tensor]) -> Callable[..., None]:
    return lambda layer, args, kwargs: seen.append(kwargs["hidden_states"].detach())


def _noting_output(seen: list[Tensor]) -> Callable[..., None]:
    return lambda part, args, output: seen.append(output[0].detach())


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def rounding(passes: Passes) -> float:
    """How far the last layer's output is from the first layer's input plus all that was added to it, in fp64."""
    first, last = passes[min(passes)], passes[max(passes)]
    added = [part.double() for _, attention, mlp, *_ in passes.values() for part in (attention, mlp)]
    return relative(last[3], first[0].double() + torch.stack(added).sum(0))


def row() -> Tensor:
    return torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def passes_of_a_model() -> Passes:
    """In one forward pass."""
    with norms_as_of_apex():
        model = build()
        passes = watch(model.decoder.layers)
        model(row(), torch.arange(TOKENS)[None], None, labels=row().roll(-1, 1))
    return passes


def passes_of_a_stage() -> Passes:
    """Of the layers of this rank, in the release's schedule."""
    with norms_as_of_apex():
        chunks: list[Any] = testing.build_chunks(build, share_embeddings_and_output_weights=False)
        passes = watch(layer for chunk in chunks for layer in chunk.decoder.layers)
        run_microbatches(chunks, [row(), row()], mean_of_row, TOKENS)
    return passes


class Mixer(torch.nn.Module):
    """In the place of Mamba's kernels: bf16 in, bf16 out."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden.bfloat16() * 0.3, None


def mamba_layer(flag: bool = True) -> Any:
    """A Mamba layer without what needs a kernel."""
    module: Any = import_module("megatron.core.ssm.mamba_layer")
    bda = import_module("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add
    layer = module.MambaLayer.__new__(module.MambaLayer)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(
        fp32_residual_connection=flag, params_dtype=torch.bfloat16, bias_dropout_fusion=False
    )
    layer.residual_in_fp32, layer.hidden_dropout, layer.mamba_bda, layer.layer_number = False, 0.0, bda, 1
    layer.norm, layer.mixer = torch.nn.Identity(), Mixer()
    layer.bias_dropout_add_exec_handler = torch.enable_grad
    return layer


def rounding_of_mamba() -> float:
    """How far the output of a Mamba layer is from its input, plus what its mixer returns."""
    hidden = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(0))
    layer = mamba_layer()
    found: Tensor = layer.forward(hidden, None)
    return relative(found, hidden.double() + layer.mixer(hidden)[0].double())


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
    return rounding(here.run(passes_of_a_model)[0])


@proof("residuals off by {:.1e}", bound=1e-6, ranks=2)
def residuals_stay_in_fp32_between_stages(here: Here) -> float:
    """fp32_residual_connection has no effect on pipeline stages: residuals are rounded to bf16 there, too.

    To reproduce: run two microbatches of the model of the other proof by `get_forward_backward_func()`, on two pipeline
    stages with `pipeline_dtype=torch.bfloat16`; and so on two virtual stages for each rank.

    A stage that gets its input in bf16 has lost what fp32 was asked for. Right is a message in fp32, as from 0.17 on.
    What is measured is the distance of the last stage's output from the sum in fp64 of the first stage's input and of
    what the layers of both stages add to it.

    From 0.12 to 0.16. From 0.17 on the flag sets pipeline_dtype to fp32, by pull request 3504.
    """
    found = []
    for layout in (Layout(pp=STAGES), Layout(pp=STAGES, vp=LAYERS // STAGES)):
        ranks: list[Passes] = here.run(passes_of_a_stage, layout=layout)
        found.append(rounding({number: seen for rank in ranks for number, seen in rank.items()}))
    return max(found)


@proof("residuals off by {:.1e}", bound=1e-6)
def residuals_stay_in_fp32_in_mamba_layers(here: Here) -> float:
    """fp32_residual_connection has no effect in Mamba layers: residuals are rounded to bf16.

    To reproduce: give a MambaLayer with `params_dtype=torch.bfloat16` and `fp32_residual_connection=True` an input in
    fp32, and look at the dtype of what it returns. It is bf16. `residual_in_fp32`, which is about something else, is
    off.

    Right is the sum in fp32 of the input and of what the mixer returns. The mixer, which needs kernels, and the norm
    are stood in.

    From 0.12 to 0.16.
    """
    found: float = here.run(rounding_of_mamba)[0]
    return found

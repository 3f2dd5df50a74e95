"""Proofs of muon-qkv-shapes. Muon needs the package emerging_optimizers. torch stands in for its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shim import testing
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

LR = 0.1
TOWER: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4}


class Orthogonalized(torch.optim.Optimizer):
    """Stands in for the base class of Muon: steps without momentum, by what `orthogonalize` returns.

    The momentum is there, because checkpoints have it.
    """

    def __init__(self, params: Any, lr: float, momentum: float, *, scaled_orthogonalize_fn: Any, **_: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for weight in group["params"]:
            if not self.state[weight] and not (skip_non_grad_params and weight.grad is None):
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._init_group(group)
            for weight in group["params"]:
                weight -= group["lr"] * self.orthogonalize(weight, weight.grad)  # type: ignore[attr-defined]


def orthogonal(gradient: Tensor, **_: Any) -> Tensor:
    """Stands in for the iteration of Newton and Schulz: the nearest orthogonal matrix, which it approximates."""
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    return (left @ right).to(gradient)


@contextmanager
def muon() -> Iterator[Callable[[Any, Sequence[Any]], Any]]:
    """A function that makes Muon of a config and model chunks, from upstream's classes on the stand-ins."""
    from megatron.core import optimizer

    names = "emerging_optimizers" if hasattr(optimizer, "_get_megatron_emerging_optimizer") else "muon"
    module: Any = import_module(f"megatron.core.optimizer.{names}")
    upstream = module.TensorParallelMuon
    based = issubclass(upstream, torch.optim.Optimizer)  # on the package itself
    kind = upstream if based else type("Muon", (upstream, Orthogonalized), {})
    stand_ins: dict[str, Any] = {
        "HAVE_EMERGING_OPTIMIZERS": True,
        "TensorParallelMuon": kind,
        "newton_schulz_tp": orthogonal,
        "get_muon_scale_factor": lambda *_, **__: 1.0,
        **({} if based else {"OrthogonalizedOptimizer": Orthogonalized}),
    }
    with mock.patch.multiple(module, create=True, **stand_ins):
        if names == "muon":
            make = module.get_megatron_muon_optimizer
            yield lambda config, chunks: make(config, chunks, use_gloo_process_groups=False)
        else:
            entry = module._EMERGING_OPTIMIZERS["muon"]
            with (
                mock.patch.object(optimizer, "HAVE_EMERGING_OPTIMIZERS", True),
                mock.patch.object(entry, "optimizer_cls", kind),
            ):
                yield optimizer_on_cpu


def language_model(**options: Any) -> nn.Module:
    return testing.build_gpt(num_layers=1, mtp_num_layers=None, **options)


def gated_model(**options: Any) -> nn.Module:
    """A language model with gated attention."""
    return language_model(attention_output_gate=True, **options)


def with_a_tower(**tower: Any) -> nn.Module:
    """A language model with a vision tower beside it, and the config of the language model, as LLaVAModel has it."""
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    language: Any = language_model()
    spec = get_vit_layer_with_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
    config = TransformerConfig(**{**ON_CPU, **TOWER, "add_bias_linear": False, **tower})
    model = MegatronModule(language.config)
    model.language_model = language
    model.vision_model = CLIPViTModel(config, spec, ln_pre_impl=WrappedTorchNorm, patch_dim=4, img_h=8, img_w=8)
    return model


def parts(attention: Any) -> list[Tensor]:
    """The rows of linear_qkv's weight that make query, key, value and gate, as the module itself tells them apart."""
    weight = attention.linear_qkv.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
        weight[:, 0] = torch.arange(len(weight))
        states = torch.zeros(1, 1, weight.shape[1], dtype=weight.dtype)
        states[..., 0] = 1
        gated = {"output_gate": True} if attention.config.attention_output_gate else {}
        made = attention.get_query_key_value_tensors(states, None, **gated)
        weight.copy_(before)
    return [part.flatten().long() for part in made]


def changes(build: Callable[[], nn.Module], **settings: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each weight of `linear_qkv`, what a step of Muon on random gradients changes, and what it should change."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    need_option("muon_momentum", "Muon", "optimizer.optimizer_config:OptimizerConfig")
    if find_spec("megatron.core.optimizer.muon") is None:
        raise CannotRunError("Muon of this release is in another module")
    model: Any = build()
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "linear_qkv")]
    rows = [parts(attention) for attention in attentions]
    weights = [attention.linear_qkv.weight for attention in attentions]
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(**{"optimizer": "muon", "lr": LR, "weight_decay": 0.0, "clip_grad": 0.0, **settings})
    generator = torch.Generator().manual_seed(1)
    with muon() as make, mock.patch.object(Tensor, "type", type_on_a_gpu):
        optimizer = make(config, [wrapped])
        for weight in model.parameters():
            weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
        before = [weight.detach().clone() for weight in weights]
        gradients = [weight.main_grad.float() for weight in weights]
        optimizer.step()
    made = []
    for weight, old, gradient, split in zip(weights, before, gradients, rows, strict=True):
        expected = torch.zeros_like(gradient)
        for part in split:
            expected[part] = -LR * orthogonal(gradient[part])
        made.append((weight.detach() - old, expected))
    return made


def error(build: Callable[[], nn.Module], **settings: Any) -> float:
    """The largest error of a step, relative to the step that is right."""
    return max(float((found - right).norm() / right.norm()) for found, right in changes(build, **settings))


@proof("update off by {:.1e}", bound=1e-5, variants=("v0_16", "v0_18"))
def muon_splits_gated_attention_in_its_parts(here: Here) -> float:
    """Muon orthogonalizes blocks of gated attention that mix query, gate, key and value.

    To reproduce: build a GPTModel with `attention_output_gate=True`, 4 heads in 2 groups and head size 8, and make its
    optimizer with `OptimizerConfig(optimizer="muon")` (`get_megatron_muon_optimizer` up to 0.17). Take a step on random
    gradients. Compare the change of `linear_qkv.weight` with query, gate, key and value orthogonalized each by itself.

    The rows of a query group are [query, gate, key, value], and Muon splits them as [query, key, value]: 96 rows are
    taken for three groups of 32. Right is each part by itself. Fixed in 0.19 by Megatron-LM pull request 4728. torch
    stands in for the package emerging_optimizers here.
    """
    return here.run(error, gated_model)[0]


def few_groups() -> nn.Module:
    return gated_model(num_attention_heads=8, num_query_groups=1)


@proof(
    "update off by {:.1e}",
    bound=1e-5,
    variants=("v0_16", "v0_18"),
    defect="crash",
    crashes=r"^RuntimeError: shape '\[1, 40, -1\]' is invalid for input of size 2304",
)
def muon_trains_gated_attention(here: Here) -> float:
    """Muon cannot train gated attention if its weight has no view in the wrong shapes.

    To reproduce: as above with 8 heads in one group: "RuntimeError: shape '[1, 40, -1]' is invalid for input of size
    2304" in the first step.

    Fixed in 0.19 by Megatron-LM pull request 4728.
    """
    return here.run(error, few_groups)[0]


@proof("update off by {:.1e}", bound=1e-5)
def muon_splits_a_vision_tower_by_its_own_shapes(here: Here) -> float:
    """Muon splits the attention of a vision tower by the shapes of the language model.

    To reproduce: put a CLIPViTModel of 4 heads of size 16 beside a GPTModel of 4 heads of size 8 in 2 groups, in a
    module with the config of the GPTModel, as LLaVAModel has it. Go on as above with the weight of the tower.

    Its 192 rows are four heads, each [query, key, value] of 16 rows, and are taken for six groups of [16, 8, 8]. If
    they do not divide, 0.16 to 0.18 raise or take other columns for rows, and later releases do not split the weight.
    Right are the tower's own query, key and value, each by itself. Open upstream. torch stands in as above.
    """
    return here.run(error, with_a_tower)[0]

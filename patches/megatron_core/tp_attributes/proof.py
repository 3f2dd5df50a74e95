"""Proofs of tp-attributes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from shim import testing
from shim.patches.megatron_core._proof_mamba import mamba_on_cpu
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu
from shim.testing.proof import CannotRunError, Here, proof

STEPS = 3
RANK = 4  # of a low-rank adapter
HIDDEN, EXPERTS = 32, 2


@contextmanager
def optimizers_of_torch() -> Iterator[None]:
    """Without a GPU: the names of tensors' types as they are there, and torch's kernels for Transformer Engine's."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads

    kernels = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    with (
        mock.patch.object(Tensor, "type", type_on_a_gpu),
        mock.patch.multiple(clip_grads, **{name: kernels[name] for name in kernels if hasattr(clip_grads, name)}),
        mock.patch.object(optimizer, "SGD", torch.optim.SGD),
    ):
        yield


def muon_on_cpu(config: Any, model_chunks: Sequence[Any]) -> Any:
    """The muon optimizer of 0.16 and 0.17. SGD takes the place of its kernels, which come in another package."""
    muon: Any = import_module("megatron.core.optimizer.muon")
    stand_ins: dict[str, Any] = {
        "HAVE_EMERGING_OPTIMIZERS": True,
        "TensorParallelMuon": lambda groups, lr, **options: torch.optim.SGD(groups, lr=lr),
    }
    with mock.patch.multiple(muon, **stand_ins):
        return muon.get_megatron_muon_optimizer(config, model_chunks, use_gloo_process_groups=False)


def wrapped_and_optimizer(
    model: Any,
    distributed: bool = False,
    make: Callable[[Any, Sequence[Any]], Any] = optimizer_on_cpu,
    **settings: Any,
) -> tuple[Any, Any]:
    """The model in DistributedDataParallel, and its optimizer, which clips every step of this test."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    chosen = {"optimizer": "adam" if distributed else "sgd", "lr": 0.1, "clip_grad": 0.01, **settings}
    config = OptimizerConfig(use_distributed_optimizer=distributed, **chosen)
    with optimizers_of_torch():
        return wrapped, make(config, [wrapped])


def trained(build: Callable[[], Any], **settings: Any) -> list[float]:
    """The norm of the gradient before clipping, in each step of a training on one row."""
    wrapped, optimizer = wrapped_and_optimizer(build(), **settings)
    norms = []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        row = (torch.arange(16)[None] * (step + 3)) % 61
        wrapped(row, torch.arange(16)[None], None, labels=row.roll(-1, 1)).mean().backward()
        wrapped.finish_grad_sync()
        with optimizers_of_torch():
            norms.append(float(optimizer.step()[1]))
    return norms


def off(here: Here, build: Callable[[], Any], train: Callable[..., list[float]] = trained, **settings: Any) -> float:
    """The worst relative error of a norm at tensor parallelism 2. Right is that of one rank."""
    run = functools.partial(train, build, **settings)
    # Ranks first: they are forked, and this process has computed no gradient yet.
    found = here.run(run, layout=testing.Layout(tp=2))
    right = here.run(run)[0]
    return max(abs(one / other - 1) for norms in found for one, other in zip(norms, right, strict=True))


def without_initialisation(**options: Any) -> nn.Module:
    """A GPT model as trainers build it that load a checkpoint into it."""
    options = {"num_layers": 1, "mtp_num_layers": None, "share_embeddings_and_output_weights": False, **options}
    model = testing.build_gpt(perform_initialization=False, **options)
    model.load_state_dict(testing.build_gpt(**options).state_dict())
    return model


LAYERS = ("v0_12", "v0_15", "v0_16", "v0_17")  # the variants of releases whose layers set wrong attributes


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, variants=LAYERS)
def a_model_built_without_initialisation_is_clipped_by_its_whole_norm(here: Here) -> float:
    """With perform_initialization=False the gradient is clipped by the norm of one tensor-parallel rank.

    To reproduce: build a GPTModel of local layers with `perform_initialization=False` at tensor_model_parallel_size 2,
    load weights into it, and train some steps with a small clip_grad. Compare the norm that `optimizer.step()` returns
    with that of the same model on one rank.

    VocabParallelEmbedding, ColumnParallelLinear and RowParallelLinear set tensor_model_parallel on their weights while
    they initialise them, and not at all without that. Unmarked gradients are left out of the norm on all ranks but the
    first, which are then clipped less than they should. The norm is 3.0 for 4.5. Fixed in 0.18 by Megatron-LM pull
    request 4084.
    """
    return off(here, without_initialisation)


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, variants=("v0_16", "v0_17"))
def muon_clips_by_the_whole_norm(here: Here) -> float:
    """With perform_initialization=False muon clips the gradient by the norm of one tensor-parallel rank, too.

    To reproduce: run the first proof with `get_megatron_muon_optimizer`. Its norm is that of the other optimizers, over
    the same marks. SGD takes the place of muon's kernels here. Right is the norm of one rank.

    In 0.16 and 0.17. From 0.18 on muon goes the way of the others.
    """
    return off(here, without_initialisation, make=muon_on_cpu)


def with_sinks() -> nn.Module:
    """A GPT model whose attention sinks and norms are trained, and nothing else."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with mock.patch("shim.testing.model.CPUCoreAttention", DotProductAttention):
        model = testing.build_gpt(num_layers=2, mtp_num_layers=None, softmax_type="learnable")
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name or "softmax_offset" in name)
        if "softmax_offset" in name:
            weight.data = torch.linspace(-1, 1, weight.numel() * size).chunk(size)[rank].clone()
    return model


@proof(
    "clip norm off by {:.1e}",
    bound=1e-5,
    ranks=2,
    variants=("v0_15", "v0_16", "v0_17", "v0_18", "v0_19"),
)
def attention_sinks_count_in_the_clip_norm(here: Here) -> float:
    """Attention sinks are left out of the gradient norm on all tensor-parallel ranks but the first.

    To reproduce: build a GPTModel with `softmax_type="learnable"` and DotProductAttention at tensor_model_parallel_size
    2, freeze all but `softmax_offset` and the norms, and train some steps with a small clip_grad. Compare the norm that
    `optimizer.step()` returns with that of the same model on one rank.

    Each rank has the sinks of its own heads, but nothing marks softmax_offset as tensor_model_parallel, so it counts as
    a copy of what the first rank has. Its gradient should count on every rank. From 0.15 on; Megatron-LM pull request
    7530 is open.
    """
    return off(here, with_sinks)


def trained_with_mamba(build: Callable[[], Any]) -> list[float]:
    with mamba_on_cpu():
        return trained(build)


def with_gated_norm() -> nn.Module:
    """A GPT model with a Mamba mixer beside its MLP. The gated norm and the model's norms are trained, and no more."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    config = model.config
    config.mamba_state_dim, config.mamba_head_dim, config.mamba_num_groups = 4, 8, 2
    module: Any = sys.modules["megatron.core.ssm.mamba_mixer"]
    parts = module.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    taken = {"pg_collection", "model_comm_pgs"} & set(inspect.signature(module.MambaMixer).parameters)
    groups = SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(), cp=parallel_state.get_context_parallel_group()
    )
    mixer = module.MambaMixer(config, parts, HIDDEN, **dict.fromkeys(taken, groups))
    inner, heads = mixer.norm.weight.numel(), mixer.A_log.numel()
    states = (mixer.conv1d.weight.shape[0] - inner) // 2
    # Each rank has a part of each section, so that its rows are not neighbours in the whole weight.
    for weight, sections in (
        (mixer.in_proj.weight, [inner, inner, states, states, heads]),
        *((weight, [inner, states, states]) for weight in (mixer.conv1d.weight, mixer.conv1d.bias)),
        *((weight, [heads]) for weight in (mixer.dt_bias, mixer.A_log, mixer.D)),
    ):
        for section in weight.split(sections):
            fill(section, 0)
    fill(mixer.norm.weight, 0)
    fill(mixer.out_proj.weight, 1)
    mlp = model.decoder.layers[0].mlp
    mlp.mixer = mixer
    mlp.register_forward_hook(lambda base, args, output: (output[0] + base.mixer(args[0])[0], output[1]))
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)
    assert inner * parallel_state.get_tensor_model_parallel_world_size() == 2 * HIDDEN
    return model


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, variants=LAYERS[:2])
def the_norm_of_a_mamba_mixer_counts_in_the_clip_norm(here: Here) -> float:
    """Mamba's gated norm is left out of the gradient norm on all tensor-parallel ranks but the first.

    To reproduce: build a MambaMixer at tensor_model_parallel_size 2, train its `norm.weight`, and compare the norm that
    `optimizer.step()` returns with that of the same model on one rank. (Without a GPU stand-ins take the place of
    mamba_ssm's norm and scan.)

    Each rank has the weights of its own channels, as it has those of conv1d, dt_bias, A_log and D. These are marked as
    tensor_model_parallel, and norm.weight is not, so it counts as a copy of what the first rank has. Fixed in 0.16 by
    Megatron-LM pull request 2202.
    """
    return off(here, with_gated_norm, trained_with_mamba)


class _Adapter(nn.Module):
    """A low-rank update of a column-parallel layer, of Transformer Engine's layers as mcore-bridge makes it."""

    def __init__(self, base: Any) -> None:
        from megatron.core.extensions import transformer_engine as extensions
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        assert isinstance(base, ColumnParallelLinear)
        given = {"config": base.config, "init_method": nn.init.ones_, "bias": False, "skip_bias_add": False}
        given |= {"skip_weight_param_allocation": False, "is_expert": False}
        self.down = extensions.TELinear(base.input_size, RANK, parallel_mode="duplicated", **given)
        self.up = extensions.TEColumnParallelLinear(RANK, base.output_size, gather_output=False, **given)
        fill(self.down.weight)
        fill(self.up.weight, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, in] -> [s, b, out / tp]. The products are torch's, for want of a GPU."""
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        low = copy_to_tensor_model_parallel_region(functional.linear(hidden, self.down.weight))
        return functional.linear(low, self.up.weight)


@contextmanager
def layers_can_be_built() -> Iterator[None]:
    """Layers of Transformer Engine ask for a GPU when they are built, also with weights on the CPU."""
    with mock.patch("torch.cuda.is_available", lambda: True):
        yield


def fill(weight: Tensor, dim: int | None = None, seed: int = 0) -> None:
    """Give a weight values: all of them, or this rank's part of a larger weight along `dim`."""
    from megatron.core import parallel_state

    size = 1 if dim is None else parallel_state.get_tensor_model_parallel_world_size()
    shape = [count * (size if axis == dim else 1) for axis, count in enumerate(weight.shape)]
    full = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)) * 0.2
    part = full if dim is None else full.chunk(size, dim)[parallel_state.get_tensor_model_parallel_rank()]
    with torch.no_grad():
        weight.copy_(part)


def adapted() -> nn.Module:
    """A frozen GPT model with an adapter in front of its attention and of its MLP."""
    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None).requires_grad_(False)
    layer = model.decoder.layers[0]
    for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
        with layers_can_be_built():
            linear.lora = _Adapter(linear)
        linear.register_forward_hook(lambda base, args, output: (output[0] + base.lora(args[0]), output[1]))
    return model


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, te=True, variants=LAYERS[:3])
def a_duplicated_layer_counts_once_in_the_clip_norm(here: Here) -> float:
    """A TELinear with parallel_mode="duplicated" counts once for every tensor-parallel rank in the gradient norm.

    To reproduce: train low-rank adapters on a frozen GPTModel at tensor_model_parallel_size 2, whose first factor is a
    TELinear with `parallel_mode="duplicated"` and whose second one is a TEColumnParallelLinear. Compare the norm that
    `optimizer.step()` returns with that of the same model on one rank. (Without a GPU the products of these layers have
    to be torch's.)

    TELinear hands parallel_mode=None to Transformer Engine, which marks every weight as tensor_model_parallel. So each
    rank adds the whole gradient to the norm, and gradients are clipped too much. Fixed in 0.17 by Megatron-LM pull
    request 3213.
    """
    return off(here, adapted)


class _Experts(nn.Module):
    """Grouped experts of Transformer Engine, each for an equal share of the tokens."""

    def __init__(self, config: Any) -> None:
        from megatron.core.extensions import transformer_engine as extensions

        super().__init__()
        given = {"config": config, "init_method": nn.init.ones_, "bias": True, "skip_bias_add": False}
        given |= {"is_expert": True, "tp_comm_buffer_name": None}
        self.up = extensions.TEColumnParallelGroupedLinear(EXPERTS, HIDDEN, 2 * HIDDEN, **given)
        self.down = extensions.TERowParallelGroupedLinear(EXPERTS, 2 * HIDDEN, HIDDEN, **given)
        for index in range(EXPERTS):
            fill(getattr(self.up, f"weight{index}"), 0, seed=index)
            fill(getattr(self.up, f"bias{index}"), 0, seed=index)
            fill(getattr(self.down, f"weight{index}"), 1, seed=index)
            fill(getattr(self.down, f"bias{index}"), seed=index)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]. The products are torch's, and messages are those that a dispatcher would send."""
        from megatron.core.tensor_parallel import mappings

        out = []
        tokens = mappings.copy_to_tensor_model_parallel_region(hidden).chunk(EXPERTS)
        for index, share in enumerate(tokens):
            weight, bias = (
                [getattr(layer, f"{name}{index}") for layer in (self.up, self.down)] for name in ("weight", "bias")
            )
            inner = functional.gelu(functional.linear(share, weight[0], bias[0]))
            out.append(mappings.reduce_from_tensor_model_parallel_region(functional.linear(inner, weight[1])) + bias[1])
        return torch.cat(out)


def with_experts() -> nn.Module:
    """A frozen GPT model whose MLP has grouped experts beside it."""
    import transformer_engine.pytorch as te

    # First, because 0.17 builds no model with some of these releases.
    with layers_can_be_built():
        alone = te.GroupedLinear(1, 8, 8, bias=False, device="cpu")
    if getattr(alone.weight0, "tensor_model_parallel", False):
        raise CannotRunError("Transformer Engine marks grouped experts itself before 2.13")
    return add_experts(testing.build_gpt(num_layers=1, mtp_num_layers=None).requires_grad_(False))


def add_experts(model: Any) -> nn.Module:
    mlp = model.decoder.layers[0].mlp
    with layers_can_be_built():
        mlp.experts = _Experts(model.config)
    mlp.register_forward_hook(lambda base, args, output: (output[0] + base.experts(args[0]), output[1]))
    return model


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, te=True, variants=(*LAYERS, "v0_18"))
def grouped_experts_count_in_the_clip_norm(here: Here) -> float:
    """With Transformer Engine 2.13 and later, grouped experts are left out of the norm on all ranks but the first.

    To reproduce: train TEColumnParallelGroupedLinear and TERowParallelGroupedLinear, as TEGroupedMLP has them, at
    tensor_model_parallel_size 2 with the same expert tensor parallelism. Compare the norm that `optimizer.step()`
    returns with that of the same model on one rank. (Without a GPU the products of these layers have to be torch's.)

    megatron-core relies on Transformer Engine to mark their weights as tensor_model_parallel, which 2.13 no longer
    does. So the gradients of all ranks but the first are left out, and clipped less than they should. Fixed in 0.19 by
    Megatron-LM pull request 5916.
    """
    return off(here, with_experts)


def sinks_and_experts() -> nn.Module:
    return add_experts(with_sinks())


@proof("clip norm off by {:.1e}", bound=1e-5, ranks=2, te=True, variants=("v0_19",))
def attention_sinks_count_beside_grouped_experts(here: Here) -> float:
    """Attention sinks are left out of the gradient norm that grouped experts of Transformer Engine are counted in.

    To reproduce: as for attention sinks and for grouped experts, both in one GPTModel.

    From 0.19 on megatron-core marks grouped experts, and the patch relies on it. Sinks have no mark yet. Right is the
    norm of one rank.
    """
    return off(here, sinks_and_experts)


def wrong_dimensions() -> int:
    """How many weights of row-parallel experts have another partition_dim than the dimension that is cut."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as extensions

    model: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None).requires_grad_(False)
    given = {"config": model.config, "init_method": nn.init.ones_, "bias": False, "skip_bias_add": False}
    given |= {"is_expert": True, "tp_comm_buffer_name": None}
    mlp = model.decoder.layers[0].mlp
    with layers_can_be_built():
        mlp.grouped = extensions.TERowParallelGroupedLinear(EXPERTS, 2 * HIDDEN, HIDDEN, **given)
        mlp.single = extensions.TERowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **given)
    wrapped_and_optimizer(model)
    part = 2 * HIDDEN // parallel_state.get_expert_tensor_parallel_world_size()
    weights = [weight for layer in (mlp.grouped, mlp.single) for weight in layer.parameters() if weight.requires_grad]
    assert len(weights) == EXPERTS + 1 and all(weight.shape == (HIDDEN, part) for weight in weights)
    return sum(getattr(weight, "partition_dim", -1) != 1 for weight in weights)


@proof(
    "{:.0f} of 3 weights cut along another dimension than they say",
    right="weights are cut as they say",
    ranks=2,
    te=True,
    variants=(*LAYERS, "v0_18"),
)
def row_parallel_experts_say_how_they_are_cut(here: Here) -> int:
    """Weights of row-parallel experts of Transformer Engine have the partition_dim of column-parallel ones.

    To reproduce: with expert tensor parallelism 2, build `TERowParallelLinear(..., is_expert=True)`, as the experts of
    SequentialMLP are, and with Transformer Engine before 2.13 also `TERowParallelGroupedLinear`, as those of
    TEGroupedMLP. Each rank has half of the columns, and `weight.partition_dim` is 0.

    megatron-core hands parallel_mode=None to Transformer Engine, which then marks weights as cut along rows. Muon
    gathers the parts along this dimension, and resharding cuts along it. Right is 1. Fixed in 0.19 by Megatron-LM pull
    request 5916.
    """
    return max(here.run(wrong_dimensions, layout=testing.Layout(tp=here.world)))

"""A drawn training step on its layout with shim, and the truth of it: one rank, one sequence at a time, fp64."""

import contextlib
import functools
import inspect
import zlib
from unittest import mock

import torch
from drawn_steps import STACKS
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

import shim
from shim import testing
from shim.patches.megatron_core._proof_mamba import mamba_on_cpu, mixer_spec
from shim.patches.megatron_core._proof_offloading import offloading
from shim.patches.megatron_core.gated_delta_net_norm.proof import without_kernels
from shim.testing import Layout, cpu
from shim.testing import model as model_of_tests
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu
from shim.testing.model import _global_names, _stacked
from shim.testing.oracle import _main_loss, _RankView
from shim.testing.schedules import run_microbatches

# Over the norm of all gradients, and of each that is not tiny beside it. Steps of an optimizer are taken in fp32.
BOUND = {torch.float64: (5e-6, 5e-6), torch.float32: (2e-5, 1e-3)}
EACH_OF_DELTA = 2e-5  # a gated delta net computes in fp32, also for weights in fp64
SMALL = 1e-3
# What one rank and one sequence need: to be built without Transformer Engine, and what is wrong there, too.
BUILT_BY = ("moe-without-te", "mla-without-te", "mtp-without-te", "mla-rope-softmax-scale")
RATE, EPSILON = 1.0, 1e9
# Options that say how ranks compute, and not what.
OF_RANKS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
OF_RANKS += ("num_layers_in_first_pipeline_stage", "pipeline_model_parallel_layout")


def chunks_of(step, options):
    """The models of this rank: one for each virtual stage."""
    # Norms have weights of torch's own dtype.
    chunks = [chunk.to(options["params_dtype"]) for chunk in _built(step, dict(options))]
    _fill_sections(chunks, _tied(step))
    return chunks


def _fill_sections(chunks, tied):
    """Weights whose parts on a rank are made up of parts of sections: the same on every layout."""
    for chunk in chunks:
        for name, weight in _global_names(chunk, tied):
            sections = _sections(name, chunk.config)
            if sections:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = 0.2 * torch.randn(sum(sections), *weight.shape[1:], generator=generator)
                whole += name.endswith("norm.weight")
                with torch.no_grad():
                    weight.copy_(whole_part(whole, _part(name, weight, chunk.config)))


def _sections(name, config):
    """Rows of the whole weight, by section; nothing for weights that are cut in one piece."""
    if name.endswith(".softmax_offset"):
        return (config.num_attention_heads,)
    if ".mixer." in name:
        heads, states = config.mamba_num_heads, config.mamba_num_groups * config.mamba_state_dim
        inner = heads * config.mamba_head_dim
        sections = {"in_proj.weight": (inner, inner, states, states, heads), "mixer.norm.weight": (inner,)}
        convolved = ("conv1d.weight", "conv1d_weight", "conv1d.bias", "conv1d_bias")
        sections |= dict.fromkeys(convolved, (inner, states, states))
        sections |= dict.fromkeys(("dt_bias", "A_log", "mixer.D"), (heads,))
    elif getattr(config, "linear_conv_kernel_dim", None) is not None:  # of 0.16 and later
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values, heads = config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_value_heads
        sections = {"in_proj.weight": (keys, keys, values, values, heads, heads), "conv1d.weight": (keys, keys, values)}
        sections |= {"dt_bias": (heads,), "A_log": (heads,)}
    else:
        return ()
    return next((rows for ending, rows in sections.items() if name.endswith(ending)), ())


def _built(step, options):
    if step.kind in STACKS:
        depths = options.pop("mtp_num_layers", 0)
        options.pop("num_layers")
        pattern = STACKS[step.kind] + "/*-" * depths
        return [testing.build_hybrid(pattern, mixer=mixer_spec() if step.kind == "mamba" else None, **options)]
    options.setdefault("mtp_num_layers", None)
    with contextlib.ExitStack() as stack:
        if step.kind == "delta":
            stack.enter_context(_delta_attention())
        if options.pop("own_attention", False):
            stack.enter_context(mock.patch.object(model_of_tests, "CPUCoreAttention", DotProductAttention))
        if "moe_layer_freq" in options:
            stack.enter_context(_mixed_layers(model_of_tests.CPUCoreAttention))
        return testing.build_chunks(**options)


@contextlib.contextmanager
def _mixed_layers(attention):
    """A layer has experts or not, as `moe_layer_freq` says. build_gpt builds all by one spec."""
    whole = gpt_model.GPTModel

    @functools.wraps(whole)
    def mixed(*, config, transformer_layer_spec, **options):
        make = gpt_layer_specs.get_gpt_decoder_block_spec
        block = make(
            config, use_transformer_engine=False, **model_of_tests._known(make, vp_stage=options.get("vp_stage"))
        )
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
        return whole(config=config, transformer_layer_spec=block, **options)

    with mock.patch.object(gpt_model, "GPTModel", mixed):
        yield


@contextlib.contextmanager
def _delta_attention():
    """Layers have a gated delta net in the place of attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    local = gpt_layer_specs.get_gpt_layer_local_spec
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)

    class Both(GatedDeltaNet):
        """build_gpt puts a core attention into the specs of attention."""

    def spec(*args, **kwargs):
        made = local(*args, **kwargs)
        made.submodules.self_attention = ModuleSpec(Both, submodules=parts)
        return made

    with mock.patch.object(gpt_layer_specs, "get_gpt_layer_local_spec", spec):
        yield


def freeze(step, chunk):
    """The same weights on every layout."""
    if step.frozen == "lora":
        testing.add_lora(chunk)
        return
    for name, weight in _global_names(chunk, _tied(step)):
        if step.frozen == "embedding":
            off = "embedding." in name
        elif step.frozen == "norms":
            off = "norm" in name
        elif step.frozen == "decoder":
            off = name.startswith("decoder.")
        elif step.frozen in ("experts", "router"):
            off = f".{step.frozen}." in name
        else:
            off = step.frozen == "half" and zlib.crc32(f"{step.seed}:{name}".encode()) % 2 == 0
        if off:
            weight.requires_grad_(False)


def _tied(step):
    return step.options["share_embeddings_and_output_weights"]


@contextlib.contextmanager
def here(layout, kind, instances=1):
    """instances: of the distributed optimizer, each of which has a part of the replicas."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(testing.megatron_on_cpu())
        if instances > 1:
            initialise = parallel_state.initialize_model_parallel
            several = functools.partial(initialise, num_distributed_optimizer_instances=instances)
            stack.enter_context(mock.patch.object(parallel_state, "initialize_model_parallel", several))
        stack.enter_context(testing.layout_initialised(layout))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _sizes_on_the_host))
        for mask in ("get_default_causal_mask", "get_sliding_window_causal_mask"):
            if hasattr(fused_softmax, mask):
                made = _on_the_host(getattr(fused_softmax, mask))
                stack.enter_context(mock.patch.object(fused_softmax, mask, made))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if kind == "delta":
            stack.enter_context(without_kernels())
        if kind == "mamba":
            stack.enter_context(mamba_on_cpu())
        yield


def _sizes_on_the_host(tensor, as_numpy=False, record_stream=False):
    """As of a tensor on a GPU: messages take sizes as numbers."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _on_the_host(make):
    """A function that names a GPU also in backward passes, in which torch calls no mode of functions."""

    @functools.wraps(make)
    def made(*args):
        with cpu._CudaMeansCpu():
            return make(*args)

    return made


def row_of(step, replica, number):
    lengths = step.rows[replica][number]
    sequences = testing.random_sequences(lengths, seed=100 * step.seed + 10 * replica + number)
    masks = None
    if step.prompts:
        masks = [(torch.arange(length) >= length // 3).float() for length in lengths]
    if number in step.untrained:
        masks = [torch.zeros(length) for length in lengths]
    return testing.pack(sequences, align=step.align, total=step.total, loss_masks=masks)


def truth(step):
    """Name -> gradient of a weight that the step trains, whole. Every sequence runs alone, on one rank."""
    options = {name: value for name, value in step.options.items() if name not in OF_RANKS}
    options |= {"sequence_parallel": False, "params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    wanted = [id for id in BUILT_BY if shim.plan()[id].wanted]
    with here(Layout(), step.kind), shim.patched(only=wanted):
        (model,) = chunks_of(step, options)
        freeze(step, model)
        trained = {name for name, weight in _global_names(model, _tied(step)) if weight.requires_grad}
        model.requires_grad_(True)  # stock loses some gradients beside frozen weights
        per_token = options["calculate_per_token_loss"]
        total, counted, rows = {}, 0, 0
        for replica, numbers in enumerate(step.rows):
            for number in range(len(numbers)):
                row = row_of(step, replica, number)
                scale = 1.0 if per_token else 1.0 / len(row.spans)
                MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
                for name, gradient in testing.run_alone(model, row, per_token_loss=per_token).grads.items():
                    total[name] = total.get(name, 0) + gradient
                counted, rows = counted + row.loss_mask.sum(), rows + 1
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        names = {id(weight): name for name, weight in _global_names(model, _tied(step))}
        by_name = {name: names[id(weight)] for name, weight in model.named_parameters()}
        right = {by_name[name]: gradient / (counted if per_token else rows) for name, gradient in total.items()}
        return clipped({name: gradient for name, gradient in right.items() if name in trained}, step.clip)


def clipped(gradients, clip):
    if not clip or not gradients:
        return gradients
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    scale = min(1.0, float(clip / (norm + 1e-6)))
    return {name: scale * gradient for name, gradient in gradients.items()}


def found(step):
    """(name, gradient, part of the whole) for each trained weight of this rank after the step with shim.

    part: (dimension, ranks, rank, matrices that are stacked or rows of sections), or None for a whole weight.
    """
    shim.apply()
    with here(step.layout, step.kind, step.ddp.get("num_distributed_optimizer_instances", 1)):
        options = dict(step.options)
        if step.layout.vp > 1:
            options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        chunks = chunks_of(step, options)
        for chunk in chunks:
            freeze(step, chunk)
        sharded = step.optimizer in ("distributed", "offloaded")
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **step.ddp)
        wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
        before = [{name: weight.detach().clone() for name, weight in chunk.named_parameters()} for chunk in chunks]
        with _devices(step.optimizer):
            optimizer = _optimizer(step, wrapped) if step.optimizer else None
        run(step, wrapped)
        with _devices(step.optimizer):
            if optimizer:
                optimizer.step()
        if ddp.overlap_param_gather:
            for chunk in wrapped:
                chunk.start_param_sync(force_sync=True)
        shares = []
        for chunk, old in zip(chunks, before, strict=True):
            for (plain, weight), (name, _) in zip(
                chunk.named_parameters(), _global_names(chunk, _tied(step)), strict=True
            ):
                # A stage with multi-token prediction and tied embeddings has an output weight that nobody uses.
                unused = plain == "output_layer.weight" and _tied(step) and hasattr(chunk, "embedding")
                if weight.requires_grad and not unused:
                    gradient = (old[plain] - weight.detach()) / rate_of(step) if optimizer else weight.main_grad.clone()
                    shares.append((name, gradient, _part(name, weight, chunk.config)))
        for chunk in wrapped:
            chunk.zero_grad_buffer()  # the next step begins so; from 0.16 on a weight without a gradient is told here
        return shares


def _devices(optimizer):
    """What optimizers ask a GPU for."""
    if optimizer == "offloaded":
        return offloading()
    return mock.patch.object(torch.Tensor, "type", type_on_a_gpu) if optimizer else contextlib.nullcontext()


def rate_of(step):
    """Weights move so far that the digits of the move are not lost beside theirs."""
    return RATE / step.clip if step.clip else RATE


def _optimizer(step, wrapped):
    kind, overlapped = step.optimizer, step.ddp.get("overlap_param_gather", False)
    # So large an epsilon makes the step of Adam the gradient times the rate.
    rule = {"optimizer": "adam", "lr": rate_of(step) * EPSILON, "adam_eps": EPSILON}
    if step.descent == "sgd":
        rule = {"optimizer": "sgd", "lr": rate_of(step), "sgd_momentum": 0.0}
    config = OptimizerConfig(
        **rule,
        weight_decay=0.0,
        clip_grad=step.clip,
        **({"overlap_param_gather": True} if overlapped else {}),
        use_distributed_optimizer=kind in ("distributed", "offloaded"),
        **({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5} if kind == "offloaded" else {}),
    )
    if kind == "offloaded":
        return get_megatron_optimizer(config, wrapped, **_without_gloo_groups())
    return optimizer_on_cpu(config, wrapped)


def _without_gloo_groups():
    known = inspect.signature(get_megatron_optimizer).parameters
    return {"use_gloo_process_groups": False} if "use_gloo_process_groups" in known else {}


def run(step, wrapped):
    """The schedule's forward and backward passes, and the sums over ranks."""
    per_token = step.options["calculate_per_token_loss"]
    replica = parallel_state.get_data_parallel_rank()
    rows = [row_of(step, replica, number) for number in range(len(step.rows[replica]))]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if step.ddp.get("overlap_grad_reduce"):
            unsynced = [one.no_sync for one in wrapped]
            chunk.config.no_sync_func = unsynced if len(wrapped) > 1 else unsynced[0]

    def forward(row, chunk):
        view = _RankView(chunk, row, True)
        given = {"packed_seq_params": row.packed_seq_params()} if step.packed else {}
        if step.masked:
            given["padding_mask"] = ~view.valid[None]
        output = chunk(
            input_ids=row.input_ids[:, view.index],
            position_ids=row.position_ids[:, view.index],
            attention_mask=None,
            labels=row.labels[:, view.index],
            loss_mask=view.mask[None],
            **given,
        )

        def loss_of(losses):
            loss = _main_loss(losses.squeeze(0), view, per_token)
            if not per_token:
                return loss / view.ranks, {}  # the schedule multiplies a mean by the ranks
            whole = testing.release().startswith("0.12.")  # counts all context-parallel ranks
            return loss, (row.loss_mask if whole else view.mask).sum().int(), {}

        return output, loss_of

    with _means_of_gloo() if step.ddp.get("average_in_collective") else contextlib.nullcontext():
        run_microbatches(wrapped if len(wrapped) > 1 else wrapped[0], rows, forward, step.total)


def _mean(reduce, given):
    """given: the place of the argument that has this rank's values."""

    @functools.wraps(reduce)
    def reduced(*args, op=torch.distributed.ReduceOp.SUM, group=None, **kwargs):
        if op == torch.distributed.ReduceOp.AVG:
            args[given].div_(torch.distributed.get_world_size(group))
            op = torch.distributed.ReduceOp.SUM
        return reduce(*args, op=op, group=group, **kwargs)

    return reduced


@contextlib.contextmanager
def _means_of_gloo():
    """gloo takes no means, which NCCL takes."""

    scatter = param_and_grad_buffer.dist_reduce_scatter_func
    with (
        mock.patch.object(torch.distributed, "all_reduce", _mean(torch.distributed.all_reduce, 0)),
        mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", _mean(scatter, 1)),
    ):
        yield


def _part(name, weight, config):
    sections = _sections(name, config)
    if sections:
        size = parallel_state.get_tensor_model_parallel_world_size()
        return 0, size, parallel_state.get_tensor_model_parallel_rank(), sections
    of_experts = ".experts." in name
    kind = "expert_tensor_parallel" if of_experts else "tensor_model_parallel"
    size = getattr(parallel_state, f"get_{kind}_world_size")()
    dim = getattr(weight, "partition_dim", -1)
    if size == 1 or not getattr(weight, "tensor_model_parallel", False) or dim < 0:
        return None
    return dim, size, getattr(parallel_state, f"get_{kind}_rank")(), _stacked(name, config)


def whole_part(gradient, part):
    """This rank's part of a whole weight's gradient."""
    if part is None:
        return gradient
    dim, size, rank, stacked = part
    pieces = gradient.chunk(stacked, dim) if isinstance(stacked, int) else gradient.split(stacked, dim)
    return torch.cat([one.chunk(size, dim)[rank] for one in pieces], dim)


def worst(shares, right):
    """The error of this rank's gradients over their norm, and (error, name) of the weight that is farthest off."""
    norm = torch.cat([gradient.flatten() for gradient in right.values()]).double().norm()
    missing = torch.zeros((), dtype=torch.float64)
    all_off, errors = torch.zeros((), dtype=torch.float64), [(0.0, "")]
    for name, gradient, part in shares:
        true = whole_part(right[name].double(), part) if name in right else missing
        off = (gradient.double() - true).norm()
        all_off = all_off + off.square()
        relative = off / max(true.norm(), SMALL * norm)
        errors.append((float("inf") if off.isnan() else float(relative), name))
    return float(all_off.sqrt() / norm), max(errors)

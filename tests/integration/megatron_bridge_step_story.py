"""What one process with Megatron-Bridge has to tell of its own training step: its provider, batch, loss and optimizer.

Its packages are imported without their __init__, which want all of Hugging Face. modelopt, and what it takes of Python
3.12, are stand-ins. Nothing of them is called here.
"""

import contextlib
import sys
import typing
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import trainers
import typing_extensions
from megatron_bridge_story import _directories
from te_on_cpu import te_modules_built, te_modules_on_cpu

import shim
from shim import testing
from shim.testing.cpu import type_on_a_gpu
from shim.testing.model import ON_CPU

# Equal lengths in a row: from 0.17 on a sum over tokens weighs a layer of MTP by tokens over tokens with a target.
LENGTHS, ALIGN, STEPS = [(5, 5, 5), (11, 11)], 8, 2
PACKAGES = ("models", "peft", "training", "training.post_training", "training.utils", "utils", "data", "models.gpt")


def import_step():
    """Its modules of a training step, as of `pretrain(..., forward_step)`."""
    typing.override = typing_extensions.override
    for name in ("modelopt", "modelopt.torch", "modelopt.torch.distill"):
        sys.modules[name] = ModuleType(name)
    sys.modules["modelopt"].torch = sys.modules["modelopt.torch"]
    sys.modules["modelopt.torch"].distill = sys.modules["modelopt.torch.distill"]
    for name in ("megatron.bridge", *(f"megatron.bridge.{part}" for part in PACKAGES)):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path) for path in _directories(name) if path.exists()]
    # The step takes a name of each.
    for name, wanted in {"post_training.distillation": "loss_func_kd", "state": "GlobalState"}.items():
        module = sys.modules[f"megatron.bridge.training.{name}"] = ModuleType(name)
        setattr(module, wanted, object)
    models = sys.modules["megatron.bridge.models"]
    models.T5ModelProvider = type("T5ModelProvider", (), {})
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    models.GPTModelProvider = GPTModelProvider
    from megatron.bridge.training import gpt_step, optim
    from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig

    return SimpleNamespace(
        provider=GPTModelProvider, step=gpt_step, optim=optim, optimizer=OptimizerConfig, scheduler=SchedulerConfig
    )


def layer_spec(config):
    """Transformer Engine's layers, as by default, without its kernels of attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.submodules.core_attention = testing.CPUCoreAttention
    return spec


def state():
    """What forward_step reads of a GlobalState."""
    checks = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    dataset = SimpleNamespace(skip_getting_attention_mask_from_dataset=True)
    cfg = SimpleNamespace(dataset=dataset, rerun_state_machine=checks)
    return SimpleNamespace(timers=mock.MagicMock(), straggler_timer=mock.MagicMock(), cfg=cfg)


def packed(lengths, seed):
    """A row as its packed dataset makes it: the offsets end with -1, and the loss mask is 0 on padding."""
    row = testing.pack(testing.random_sequences(lengths, seed=seed), align=ALIGN)
    real = torch.tensor([0, *lengths]).cumsum(0)
    offsets = {"cu_seqlens": torch.tensor([0, *row.ends, -1]), "cu_seqlens_unpadded": torch.tensor([*real, -1])}
    ends = {f"{name}_argmin": torch.tensor([[len(row.ends) + 1]]) for name in offsets}
    longest = torch.tensor([[max(end - start for (start, _), end in zip(row.spans, row.ends))]])
    offsets = {name: value[None].int() for name, value in offsets.items()}
    return [{**_parts(row), **offsets, **ends, "max_seqlen": longest}]


def alone(lengths, seed):
    return [_parts(testing.pack([sequence])) for sequence in testing.random_sequences(lengths, seed=seed)]


def _parts(row):
    return {
        "tokens": row.input_ids,
        "labels": row.labels,
        "position_ids": row.position_ids,
        "loss_mask": row.loss_mask,
    }


def trained(bridge, batches_of):
    """The losses of two steps, and the weights afterwards."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    provider = bridge.provider(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        seq_length=64,
        vocab_size=64,
        position_embedding_type="rope",
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.3,
        calculate_per_token_loss=True,
        transformer_layer_spec=layer_spec,
        hidden_dropout=0.0,
        add_bias_linear=False,
        **ON_CPU,
    )
    provider.finalize()
    if not parallel_state.model_parallel_is_initialized():
        provider.initialize_model_parallel(seed=0)
    torch.manual_seed(3)
    ddp = DistributedDataParallelConfig()
    model = provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True)
    shim.check(model)
    model[0].config.finalize_model_grads_func = finalize_model_grads
    scheduler = bridge.scheduler(lr_decay_iters=STEPS, lr_warmup_iters=0, lr_decay_style="constant")
    scheduler.lr_decay_steps, scheduler.lr_warmup_steps, scheduler.wd_incr_steps = STEPS, 0, STEPS
    scheduler.start_weight_decay = scheduler.end_weight_decay = 0.0
    # Of so large an epsilon, because the rounding of a gradient near zero is not to become a whole step.
    settings = bridge.optimizer(optimizer="adam", adam_eps=1.0, lr=0.1, min_lr=0.1, clip_grad=1.0)
    settings.use_distributed_optimizer = False
    settings.finalize()
    optimizer, _ = bridge.optim.setup_optimizer(settings, scheduler, model)
    losses = []
    for step, lengths in enumerate(LENGTHS):
        batches = batches_of(lengths, step)
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=partial(bridge.step.forward_step, state()),
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=64,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        total, tokens = torch.stack([part["lm loss"] for part in parts]).sum(0).tolist()
        losses.append(total / tokens)
    return losses, torch.cat([weight.detach().flatten() for weight in model[0].parameters()])


def tell(order):
    """How far packed rows are from their sequences alone, and the states of the patch."""
    if order == "first":
        shim.apply(require="mtp-packed-sequences")
    bridge = import_step()
    trainers.join()
    on_cpu = testing.megatron_on_cpu(), testing.te_cuda_stand_ins(), te_modules_built(), te_modules_on_cpu()
    with contextlib.ExitStack() as stack:
        typed = mock.patch.object(torch.Tensor, "type", type_on_a_gpu)
        for each in (*on_cpu, testing.multi_tensor_ops(), typed):
            stack.enter_context(each)
        if order == "late":
            shim.apply(require="mtp-packed-sequences")
        elif order == "stock":
            shim.apply(only=[])
        (losses, weights), (right, truth) = trained(bridge, packed), trained(bridge, alone)
    return {
        "losses": [abs(a / b - 1) for a, b in zip(losses, right, strict=True)],
        "weights": ((weights - truth).norm() / truth.norm()).item(),
        "state": shim.status()["mtp-packed-sequences"].state,
    }

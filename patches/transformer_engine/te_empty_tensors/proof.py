"""Proofs of te-empty-tensors.

The Python layer and its optimizer are real. Of the compiled part, shim.testing.multi_tensor stands in: it reads the
chunks that the compiled loop reads, which follows from multi_tensor_apply.cuh, and computes them by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.testing.proof import Here, proof

OPTIMIZERS = "transformer_engine.pytorch.optimizers"
CLIP = "megatron.core.optimizer.clip_grads"


def parameters(sizes: Sequence[int]) -> list[torch.nn.Parameter]:
    """With gradients; those of a size are the same each time."""
    made = []
    for number, size in enumerate(sizes):
        values = torch.randn(2, size, generator=torch.Generator().manual_seed(number))
        parameter = torch.nn.Parameter(values[0])
        parameter.grad = values[1]
        made.append(parameter)
    return made


def unlike_adamw(sizes: Sequence[int]) -> int:
    """How many weights of these sizes are not those of torch's AdamW after a step of FusedAdam."""
    stepped, right = parameters(sizes), parameters(sizes)
    arguments: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    with testing.te_cuda_stand_ins(), testing.multi_tensor_ops():
        import_module(OPTIMIZERS).FusedAdam(stepped, **arguments).step()
    torch.optim.AdamW(right, **arguments).step()
    return sum(not torch.allclose(*pair, rtol=0, atol=1e-5) for pair in zip(stepped, right, strict=True))


def with_te(function: Callable[[], Any]) -> Any:
    """Run it with the operations of Transformer Engine in the place of megatron-core's own loops, which some lack."""
    optimizers, clip = import_module(OPTIMIZERS), import_module(CLIP)
    operations = {"multi_tensor_applier": "multi_tensor_applier", "l2_norm_impl": "multi_tensor_l2norm"}
    used = {name: getattr(optimizers, ours) for name, ours in operations.items()}
    with testing.te_cuda_stand_ins(), testing.multi_tensor_ops(), mock.patch.multiple(clip, **used):
        return function()


def norm(gradients: list[Tensor]) -> float:
    """By megatron-core's get_grad_norm_fp32."""
    clip = import_module(CLIP)
    model_parallel = import_module("megatron.core.parallel_state").get_model_parallel_group()
    return float(with_te(lambda: clip.get_grad_norm_fp32(gradients, grad_stats_parallel_group=model_parallel)))


def error_of_norm(sizes: Sequence[int]) -> float:
    gradients = [torch.ones(size) for size in sizes]
    exact = sum(sizes) ** 0.5
    return abs(norm(gradients) - exact) / max(exact, 1.0)


@proof("{:.0f} of 2 weights are not updated", right="updated as by AdamW", te=True, variants=["v2_1"])
def a_step_ends_with_an_empty_shard(here: Here) -> int:
    """FusedAdam does not update the weights of a list whose last tensor has no elements.

    To reproduce: give `FusedAdam` two parameters with elements, then one of size 0, as FSDP2 has it on a rank beyond
    the rows of a weight. Set gradients, and take a step. No parameter moves. Right is the step of torch's AdamW.

    `multi_tensor_apply` launches a kernel at the last chunk of the last tensor, and such a tensor has no chunk.
    Fixed in 2.18 (pull request 3212). Here torch stands in for the kernel, with the same launches.
    """
    return int(here.run(unlike_adamw, (3, 5, 0))[0])


@proof("gradient norm off by {:.0%}", bound=1e-6, te=True, variants=["v2_1"])
def the_gradient_norm_ends_with_an_empty_shard(here: Here) -> float:
    """The gradient norm of megatron-core is zero on a rank whose last gradient has no elements.

    To reproduce: call `get_grad_norm_fp32` of megatron-core, which calls `multi_tensor_applier` with
    `multi_tensor_l2norm`, with gradients of 3, 5 and 0 elements. Gradients are then clipped by too small a norm.
    Right is the norm of all. Fixed in 2.18 (pull request 3212). Here torch stands in for the kernel, with the same
    launches.
    """
    return float(here.run(error_of_norm, (3, 5, 0))[0])


@proof(
    "{:.0f} of 40 weights are not updated",
    right="updated as by AdamW",
    defect="crash",
    crashes="^TableOverrunError: tensor 36 would stand behind a table of 36",
    te=True,
    variants=["v2_1"],
)
def an_empty_shard_fills_the_table(here: Here) -> int:
    """FusedAdam writes out of bounds if the 36th tensor of a list has no elements.

    To reproduce: give `FusedAdam` 40 parameters with gradients, the 36th of size 0, and take a step.
    `multi_tensor_apply` asks whether its table is full only for a chunk, so that tensor 37 is written behind the table
    (issue 3202). With main weights it is the 30th, for a norm the 110th. On a GPU this is an illegal memory access, or
    a kernel that uses wrong addresses. Here torch stands in for the kernel, and says that the table would overrun.
    Fixed in 2.18.
    """
    return int(here.run(unlike_adamw, (*[3] * 35, 0, 3, 3, 3, 3))[0])


@proof(
    "gradient norm off by {:.0%}",
    right="zero",
    defect="crash",
    crashes="^TypeError: cannot unpack non-iterable NoneType object",
    te=True,
    variants=["v2_18"],
)
def all_shards_are_empty(here: Here) -> float:
    """The gradient norm of megatron-core raises a TypeError on a rank whose gradients all have no elements.

    To reproduce: call `get_grad_norm_fp32` of megatron-core with gradients of size 0 alone. It unpacks what
    `multi_tensor_applier` returns, which is None since 2.18 (pull request 3212). Right is zero, as before. Here torch
    stands in for the kernel.
    """
    return float(here.run(error_of_norm, (0, 0))[0])

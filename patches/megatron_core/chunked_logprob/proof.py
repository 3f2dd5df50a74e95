"""Proofs of chunked-logprob."""

from __future__ import annotations

import torch
from torch import Tensor

from shim.testing import Footprint, Layout
from shim.testing.proof import Here, proof

TOKENS, BATCH, VOCABULARY = 48, 2, 512
# Large enough that what is worked on at a time, such as a chunk, is a small part of all.
LARGE_VOCABULARY, MANY_TOKENS = 1 << 14, {"cpu": 1 << 10, "cuda": 1 << 15}


def sample(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, V] of all ranks, targets [s, b], two of which are none, and the weights [s, b] of the losses."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, BATCH, VOCABULARY, generator=generator) * 3).to(dtype)
    target = torch.randint(0, VOCABULARY, (TOKENS, BATCH), generator=generator)
    target[5, 1], target[7, 0] = -100, -1
    return logits, target, torch.rand(TOKENS, BATCH, generator=generator)


def truth(logits: Tensor, target: Tensor, weights: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of their weighted sum in fp64, over the whole vocabulary."""
    exact = logits.detach().double().requires_grad_()
    log_p = exact.log_softmax(-1)
    has_target = target >= 0
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    a = smoothing * VOCABULARY / (VOCABULARY - 1)
    losses = -((1 - a) * picked + a * log_p.mean(-1)) * has_target
    (gradient,) = torch.autograd.grad((losses * weights).sum(), exact)
    return losses.detach(), gradient


def peak_on_rank(device: str) -> float:
    """The peak of forward and backward, in units of the logits."""
    from megatron.core import tensor_parallel

    torch.manual_seed(0)
    size = (MANY_TOKENS[device], 1, LARGE_VOCABULARY)
    logits = torch.randn(size, dtype=torch.bfloat16, device=device).requires_grad_() * 1
    target = torch.randint(0, LARGE_VOCABULARY, size[:2], device=device)
    with Footprint() as footprint:
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits, target)
        torch.autograd.grad(losses.sum(), logits)
    return footprint.peak_bytes / (logits.numel() * logits.element_size())


@proof("{:.1f} times the bytes of the logits", bound=1.25, defect="memory", devices=("cpu", "cuda"))
def memory_of_the_cross_entropy(here: Here) -> float:
    """The vocab-parallel cross entropy takes memory for the logits several times over.

    To reproduce: call `tensor_parallel.vocab_parallel_cross_entropy(logits, target)` with logits in bf16, run backward,
    and look at the peak beyond the logits themselves.

    Half-precision logits are copied to fp32, the copy is kept as softmax until backward, and there are temporaries as
    large beside it. Only one such tensor is needed: the gradient, in the dtype of the logits, which backward can
    compute from the logits and a few numbers for each token. Seen in 0.12 to 0.20.
    """
    return float(here.run(peak_on_rank, here.device)[0])


def collectives_on_rank() -> int:
    from megatron.core import parallel_state, tensor_parallel

    logits, target, _ = sample()
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    mine = logits.chunk(ranks, -1)[rank].clone().requires_grad_() * 1
    with Footprint() as footprint:
        losses = tensor_parallel.vocab_parallel_cross_entropy(mine, target.clamp(min=0))
        torch.autograd.grad(losses.sum(), mine)
    return sum(footprint.collectives.values())


@proof("collectives: {:.0f}", bound=1, defect="time", ranks=2)
def collectives_of_the_cross_entropy(here: Here) -> float:
    """The vocab-parallel cross entropy waits for three collectives instead of one.

    To reproduce on two tensor-parallel ranks: call `tensor_parallel.vocab_parallel_cross_entropy(logits, target)`, run
    backward, and count the collectives.

    The largest logit, the logit of the target, and the sum of the exponentials are all-reduced one after the other. If
    each rank sends its own maximum with its own sum and the target's logit, one all-gather of three numbers for each
    token is enough. Seen in 0.12 to 0.20.
    """
    return max(here.run(collectives_on_rank, layout=Layout(tp=here.world)))


def error_on_rank(device: str) -> float:
    from megatron.core import tensor_parallel

    logits, target, weights = (value.to(device) for value in sample())
    expected_losses, expected = truth(logits, target, weights)
    computed = logits.clone().requires_grad_() * 1
    losses = tensor_parallel.vocab_parallel_cross_entropy(computed, target)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), computed)
    off = [(losses - expected_losses).abs().max() / expected_losses.abs().max()]
    off.append((gradient - expected).norm() / expected.norm())
    return float(max(off))


@proof("losses or gradients off by {:.1e}", bound=1e-6, devices=("cpu", "cuda"))
def tokens_without_a_target(here: Here) -> float:
    """The vocab-parallel cross entropy gives tokens without a target a loss and a gradient.

    To reproduce: call `tensor_parallel.vocab_parallel_cross_entropy(logits, target)` with a target of -100 for some
    tokens, as `torch.nn.functional.cross_entropy` and datasets mark them, and compare with a softmax in fp64.

    A target that no rank has counts as a logit equal to the largest one. Its loss is the logarithm of the sum of
    exponentials, and its gradient is the softmax. Right would be zero for both. A loss mask hides this; a mean over all
    tokens does not. Seen in 0.12 to 0.20.
    """
    return float(here.run(error_on_rank, here.device)[0])


def fused_error_on_rank(device: str) -> float:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    logits, target, weights = (value.to(device) for value in sample())
    expected_losses, expected = truth(logits, target, weights)
    computed = logits.clone().requires_grad_() * 1
    group = parallel_state.get_tensor_model_parallel_group()
    losses = fused_vocab_parallel_cross_entropy(computed, target, group)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), computed)
    off = [(losses - expected_losses).abs().max() / expected_losses.abs().max()]
    off.append((gradient - expected).norm() / expected.norm())
    return float(max(off))


@proof("losses or gradients off by {:.1e}", bound=1e-6)
def tokens_without_a_target_in_the_fused_cross_entropy(here: Here) -> float:
    """The fused cross entropy gives tokens without a target a loss and a gradient, and rounds gradients to bf16.

    To reproduce: call `fused_vocab_parallel_cross_entropy(logits, target, tp_group)` with logits in fp32, a target
    of -100 for some tokens, and compare with a softmax in fp64.

    Right would be zero for these tokens, and a gradient in the dtype of the logits. Seen in 0.12 to 0.20.
    """
    return float(here.run(fused_error_on_rank, here.device)[0])


def output_on_rank(device: str) -> float:
    """The bytes that a half-precision model's last step holds at its peak, in units of its logits."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, bf16=True)
    model = Float16Module(config, torch.nn.Identity())
    logits = torch.zeros((MANY_TOKENS[device], 1, LARGE_VOCABULARY), dtype=torch.bfloat16, device=device)
    with Footprint() as footprint:
        kept = model(logits)  # until the end of the measurement
    return footprint.peak_bytes / (kept.numel() * logits.element_size())


@proof("{:.1f} times the bytes of the logits", bound=0.25, defect="memory", options={"fp32_output": False})
def memory_of_the_logits_of_a_half_precision_model(here: Here) -> float:
    """A model in bf16 returns a copy of its logits in fp32.

    To reproduce: wrap a model in `Float16Module` with `bf16=True`, call it without labels, and look at the peak of its
    memory beyond the logits.

    The copy has twice the bytes of the logits, which stay beside it until backward. Whoever computes losses from logits
    in bf16 needs none. Seen in 0.12 to 0.20.
    """
    return float(here.run(output_on_rank, here.device)[0])

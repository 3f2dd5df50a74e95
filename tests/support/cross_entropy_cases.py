"""Cases of Transformer Engine's fused cross entropy, and what is right for them in fp64."""

from importlib import import_module

import torch
from megatron.core import parallel_state

from shim import testing

__all__ = ["VOCABULARY", "module", "off", "sample", "smoothed_on_rank", "truth"]

VOCABULARY = 48


def module():
    return import_module("transformer_engine.pytorch.cross_entropy")


def sample(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4, 3, VOCABULARY, generator=generator) * 3).to(dtype)
    target = torch.randint(0, VOCABULARY, (4, 3), generator=generator)
    return logits, target, torch.rand(4, 3, generator=generator)


def truth(logits, target, weights, smoothing=0.0, ignore=-100, reduce=False):
    """As in Transformer Engine: every entry has smoothing / V of the weight, the target the rest besides."""
    exact = logits.detach().double().requires_grad_()
    there = target != ignore
    log_p = exact.log_softmax(-1)
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = -((1 - smoothing) * picked + smoothing * log_p.mean(-1)) * there
    found = losses.sum() / there.sum() if reduce else losses
    (gradient,) = torch.autograd.grad((found * weights).sum(), exact)
    return found.detach(), gradient


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def smoothed_on_rank():
    with testing.layout_initialised(testing.Layout(tp=2)):
        group = parallel_state.get_tensor_model_parallel_group()
        logits, target, weights = sample()
        expected, right = truth(logits, target, weights, 0.1)
        leaf = logits.chunk(2, -1)[group.rank()].clone().requires_grad_()
        losses = module().parallel_cross_entropy(leaf * 1, target, 0.1, False, group)
        (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
        return off(losses, expected), off(gradient, right.chunk(2, -1)[group.rank()])

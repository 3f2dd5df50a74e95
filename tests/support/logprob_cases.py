"""Log-probabilities of logits by the plain formulas in fp64, and cases to compare with them."""

import os

import torch
from hypothesis import strategies as st

from shim.ops.logprob import TokenLogprobs

# test_logprob_triton.py runs these tests once more like this: with the kernels.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IGNORED = -100
HALF_ULP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
if INTERPRETED:
    HALF_ULP[torch.bfloat16] *= 2  # Triton's interpreter truncates where the device rounds


def exact(logits, target, temperature=1.0, smoothing=0.0, ignore_index=IGNORED):
    """The formulas as they stand, in fp64: (logprob, entropy, logsumexp)."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().unsqueeze(-1)
    x = logits.double() / temperature
    vocabulary = x.size(-1)
    log_p = x - x.logsumexp(-1, keepdim=True)
    keep = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    at_target = log_p.gather(-1, torch.where(keep, target, 0).long().unsqueeze(-1)).squeeze(-1)
    if smoothing:
        others = log_p.sum(-1) - at_target
        logprob = (1 - smoothing) * at_target + smoothing / (vocabulary - 1) * others
    else:
        logprob = at_target
    entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenLogprobs(*(torch.where(keep, value, 0) for value in (logprob, entropy, x.logsumexp(-1))))


def weighted(found, weights):
    """A loss in which every result has a weight of its own."""
    return sum((value * weight).sum() for value, weight in zip(found, weights) if value is not None)


def gradient_of(function, logits, *args, weights, **keywords):
    logits = logits.detach().clone().requires_grad_()
    found = function(logits, *args, **keywords)
    return found, torch.autograd.grad(weighted(found, weights), logits)[0]


def sample(*shape, dtype=torch.float32, scale=3.0, seed=0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    if ignored:
        target[torch.rand(target.shape, generator=generator) < 0.2] = IGNORED
    weights = torch.randn(3, *shape[:-1], generator=generator, dtype=torch.float64)
    return logits, target, weights


def strided(logits, how):
    """The same values at other strides."""
    if how == "transposed":
        return logits.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "sliced":
        return torch.cat([logits, logits], -1)[..., : logits.size(-1)]
    if how == "batch first" and logits.dim() > 2:
        return logits.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "every other" and logits.dim() > 2:
        return torch.stack([logits, logits], 1)[:, 0]
    if how == "expanded" and logits.dim() > 1:
        return logits[:1].expand_as(logits)
    return logits


@st.composite
def cases(draw):
    leading = draw(st.lists(st.integers(0, 4), max_size=3))
    vocabulary = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(list(HALF_ULP)))
    logits, target, weights = sample(*leading, vocabulary, dtype=dtype, seed=draw(st.integers(0, 99)))
    temperature = draw(st.sampled_from([1.0, 0.7, 3, "per token", "one tensor"]))
    if temperature == "per token":
        temperature = torch.rand(leading) + 0.5
    elif temperature == "one tensor":
        temperature = torch.tensor(1.7)
    options = {
        "temperature": temperature,
        "entropy": draw(st.sampled_from([False, "no_grad", True])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.3])) if vocabulary > 1 else 0.0,
        **draw(
            st.sampled_from([{}, {"chunk_size": 1}, {"chunk_size": 3}, {"scratch_bytes": 1}, {"scratch_bytes": 999}])
        ),
        "inplace_backward": draw(st.booleans()),
    }
    target = target.to(draw(st.sampled_from([torch.int64, torch.int32])))
    how = draw(st.sampled_from(["as it is", "transposed", "sliced", "batch first", "every other", "expanded"]))
    return strided(logits, how), target, weights, options


class Alias(torch.autograd.Function):
    """Returns the memory of its input, as a CUDA graph's or a cache's function does: to autograd it is no view."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient

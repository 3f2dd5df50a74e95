"""What tests of probes share: asking a probe, and a packed row moved without a function of megatron-core or shim."""

import itertools

import torch

from shim._engine.models import run


def said(patch, module, method, models=()):
    """True, False, or why a probe cannot tell."""
    found, why = run(patch.probe, module, method, list(models))
    return why if found is None else found


def assert_said(expected, found):
    """expected: a part of the reason if nothing is known."""
    assert found is expected if isinstance(expected, bool) else isinstance(found, str) and expected in found, found


def moved(tensor, row):
    """Each sequence of a row [1, s] moved left by one."""
    found, offsets = torch.zeros_like(tensor), row.cu_seqlens_q_padded.tolist()
    for start, end in itertools.pairwise(offsets):
        found[..., start : end - 1] = tensor[..., start + 1 : end]
    return found

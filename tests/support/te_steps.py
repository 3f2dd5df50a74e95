"""Training steps of Transformer Engine's layers, for benchmarks/gpu_steps.py --te: in BF16, and quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import te_models
import torch
from device_steps import DeviceStep, Step, backward, onto_device

from shim import testing
from shim.testing.generic import FULL
from shim.testing.user_model import Build, built

LENGTHS, ALIGN, VOCABULARY = (50, 100, 80, 26), 16, 128  # quantized products take multiples of 16 rows
TOKENS = 256


def of_row(build: Callable[..., Any], **options: Any) -> Callable[[contextlib.ExitStack], Step]:
    """One row, [1, s]."""

    def made(undo: contextlib.ExitStack) -> Step:
        model = built(Build.of(build), "cuda", **options)
        ids = torch.arange(TOKENS, device="cuda")[None] % VOCABULARY
        return lambda: backward(model, model(ids, ids, None, labels=ids).mean())

    return made


def of_packed(build: Callable[..., Any], **options: Any) -> Callable[[contextlib.ExitStack], Step]:
    """A packed row of padded sequences."""

    def made(undo: contextlib.ExitStack) -> Step:
        model = built(Build.of(build), "cuda", **options)
        row = testing.pack(testing.random_sequences(LENGTHS, VOCABULARY), align=ALIGN)
        packed = row.packed_seq_params()
        onto_device(packed)
        ids, places, labels, mask = (
            each.cuda() for each in (row.input_ids, row.position_ids, row.labels, row.loss_mask)
        )

        def step() -> list[torch.Tensor]:
            losses = model(ids, places, None, labels=labels, loss_mask=mask, packed_seq_params=packed)
            return backward(model, (losses * mask).sum() / row.total)

        return step

    return made


STEPS: Mapping[str, DeviceStep] = {
    "dense": DeviceStep(of_row(te_models.dense)),
    "packed": DeviceStep(of_packed(te_models.dense)),
    "MTP, packed": DeviceStep(of_packed(te_models.multi_token)),
    "recompute, packed": DeviceStep(of_packed(te_models.multi_token, **FULL)),
    "experts": DeviceStep(of_row(te_models.experts)),
    "MLA": DeviceStep(of_row(te_models.latent)),
    "dense, FP8": DeviceStep(of_row(te_models.dense_fp8)),
    "MTP, packed, FP8": DeviceStep(of_packed(te_models.multi_token_fp8)),
    "recompute, packed, FP8": DeviceStep(of_packed(te_models.multi_token_fp8, **FULL)),
    "experts, FP8": DeviceStep(of_row(te_models.experts_fp8)),
}

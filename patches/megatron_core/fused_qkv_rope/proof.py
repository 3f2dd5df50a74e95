"""Proofs of fused-qkv-rope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_features import need_option
from shim.testing.proof import Here, proof

ATTENTION = "megatron.core.transformer.attention"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
TOKENS = 12
YARN = {"yarn_rotary_scaling_factor": 32.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}


def _kernel(qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, sizes: list[int], **told: Any) -> tuple[Tensor, ...]:
    """Stands for apply_fused_qkv_rotary_pos_emb of Transformer Engine, by megatron-core's own rotation.

    qkv: [s, b, groups, sum of sizes]. told: what a caller may tell it of the rotation.
    """
    interleaved = told.pop("interleaved", False)
    assert not told, told
    query, key, value = qkv.split(sizes, dim=-1)
    width = sizes[2]
    query = query.reshape(*qkv.shape[:2], -1, width)
    rotate = import_module(ROPE)._apply_rotary_pos_emb_bshd
    return (
        rotate(query, q_freqs, rotary_interleaved=interleaved),
        rotate(key, k_freqs, rotary_interleaved=interleaved),
        value,
    )


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    module = import_module(ATTENTION)
    with (
        mock.patch.object(module, "apply_fused_qkv_rotary_pos_emb", _kernel, create=True),
        mock.patch.object(module, "HAVE_FUSED_QKV_ROPE", True),
    ):
        yield


def losses(fused: bool, yarn: bool = False, **options: Any) -> Tensor:
    """The loss of each token, [s], with and without fused_single_qkv_rope."""
    need_option("fused_single_qkv_rope", "fused rotation of queries, keys and values")
    of_config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kernels())
        if yarn:  # fields that trainers add to the config
            for name, value in YARN.items():
                stack.enter_context(mock.patch.object(of_config, name, value, create=True))
        model = testing.build_gpt(mtp_num_layers=None, fused_single_qkv_rope=fused, **options)
        row = torch.arange(TOKENS)[None]
        found: Tensor = model(row, row, None, labels=row.roll(-1, 1))[0].detach()
    return found


def error(yarn: bool, options: dict[str, Any]) -> float:
    """How far the losses of the fused kernel are from those of the plain path, of the largest."""
    plain = losses(False, yarn, **options)
    return float((losses(True, yarn, **options) - plain).abs().max() / plain.abs().max())


@proof("losses off by {:.1e}", right="they are those of the plain path", bound=1e-5)
def the_factor_of_yarn_is_applied(here: Here) -> float:
    """fused_single_qkv_rope ignores the factor of YaRN.

    To reproduce: build a GPTModel whose config has `yarn_rotary_scaling_factor=32`, once with
    `fused_single_qkv_rope=True` and once without, and compare the losses of a row. Megatron-core's own rotation stands
    for the kernel of Transformer Engine, which takes the tables, and no factor.

    `Attention.forward` passes mscale to apply_rotary_pos_emb, and not to apply_fused_qkv_rotary_pos_emb. Right is the
    model without the option. From 0.15 to 0.20.
    """
    found: float = here.run(error, True, {})[0]
    return found


@proof("losses off by {:.1e}", right="they are those of the plain path", bound=1e-5)
def interleaved_rotations_are_interleaved(here: Here) -> float:
    """fused_single_qkv_rope ignores rotary_interleaved.

    To reproduce: as above, with `rotary_interleaved=True` in the place of YaRN. The kernel would take
    `interleaved=True`, and is not told. From 0.15 to 0.20.
    """
    found: float = here.run(error, False, {"rotary_interleaved": True})[0]
    return found

"""Proof of fused-norm-recompute."""

from __future__ import annotations

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_features import need_option
from shim.patches.megatron_core._proof_recompute import checkpoints_without_te
from shim.testing.proof import Here, proof

TOKENS, WIDTH = 8, 16


class Norm(torch.nn.LayerNorm):
    """As TEFusedResidualRMSNorm: the norm, and its input as the residual."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[s, b, h] -> twice [s, b, h]."""
        return super().forward(hidden), hidden


def freed() -> int:
    """How many bytes of the hidden states are freed when the outputs of their norm are thrown away."""
    need_option("fused_residual_rmsnorm", "norm that returns the residual")
    with checkpoints_without_te() as random:
        hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True) * 1.0  # no leaf, as behind another layer
        whole = hidden.untyped_storage().nbytes()
        checkpoint = random.CheckpointWithoutOutput()
        normed, _ = checkpoint.checkpoint(Norm(WIDTH), hidden)
        checkpoint.discard_output_and_register_recompute(normed.sin())
        return int(whole - hidden.untyped_storage().nbytes())


@proof("{:.0f} bytes of the hidden states are freed", right="they are kept", bound=0, defect="crash")
def the_residual_is_kept(here: Here) -> float:
    """With fused_residual_rmsnorm, recompute of norms frees the hidden states.

    To reproduce: call `CheckpointWithoutOutput().checkpoint` with a norm that returns its output and its input, as
    TEFusedResidualRMSNorm does, and then `discard_output_and_register_recompute`, as a layer does with
    `recompute_modules=["layernorm"]` before it adds the residual. Look at how many bytes the hidden states have left.

    It frees the memory of all outputs, and the residual is the input. The residual connection then reads memory that is
    gone: a segmentation fault. Right is to keep what is also an input. From 0.17 to 0.20.
    """
    return float(here.run(freed)[0])

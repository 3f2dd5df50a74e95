"""Proof of dsa-indexer-gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shim.patches.megatron_core._proof_features import need_option
from shim.patches.megatron_core._proof_layers import train_layer
from shim.patches.megatron_core._proof_mla import Duplicated
from shim.testing.layout import Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import CannotRunError, Here, proof

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
TOKENS, BATCH, HIDDEN, HEADS, WIDTH = 8, 2, 16, 4, 8
STEPS, RATE = 3, 0.1


class Norm(torch.nn.LayerNorm):
    """As Transformer Engine's, whose gradient is summed over ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        for weight in self.parameters():
            vars(weight)["sequence_parallel"] = config.sequence_parallel


class Attention(torch.nn.Module):
    """DSAttention behind queries, keys and values that nothing trains, and of which a rank has some heads."""

    def __init__(self, config: Any, dsa: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.spec_utils import ModuleSpec

        super().__init__()
        self.config, self.mask = config, AttnMaskType.causal
        indexer = dsa.DSAIndexerSubmodules(Duplicated, Duplicated, Norm, Duplicated)
        parts = dsa.DSAttentionSubmodules(indexer=ModuleSpec(dsa.DSAIndexer, submodules=indexer))
        self.core = dsa.DSAttention(config, parts, 1, self.mask, "self", softmax_scale=1.0)
        rank, size = (getattr(parallel_state, f"get_tensor_model_parallel_{what}")() for what in ("rank", "world_size"))
        generator = torch.Generator().manual_seed(0)
        self.heads = [
            torch.randn(TOKENS, BATCH, HEADS, WIDTH, generator=generator).chunk(size, 2)[rank] for _ in range(3)
        ]
        with torch.no_grad():
            for _, weight in sorted(self.named_parameters()):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)

    def forward(self, hidden: Tensor, attention_mask: None) -> tuple[Tensor]:
        """[s, b, h], under sequence parallelism a rank's tokens -> as many numbers, which train the indexer."""
        low_rank = hidden[..., : self.config.q_lora_rank]
        output = self.core(*self.heads, None, x=hidden, qr=low_rank, attn_mask_type=self.mask)
        return (output.mean().expand_as(hidden),)


def _with_means(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """gloo takes no means, which 0.19 asks for and NCCL takes."""

    @functools.wraps(reduce)
    def all_reduce(tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if op == torch.distributed.ReduceOp.AVG:
            tensor.div_(torch.distributed.get_world_size(group))
            op = torch.distributed.ReduceOp.SUM
        return reduce(tensor, op=op, group=group, **kwargs)

    return all_reduce


def trained(sequence_parallel: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: a weight of the indexer before some steps of SGD on this rank, and how it has moved."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    need_option("dsa_indexer_topk", "DSA")
    if find_spec(DSA.rpartition(".")[0]) is None or find_spec(DSA) is None:
        raise CannotRunError("DSA of this release is in another module")
    dsa = import_module(DSA)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        multi_latent_attention=True,
        q_lora_rank=8,
        qk_pos_emb_head_dim=4,
        rope_type="rope",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=WIDTH,
        dsa_indexer_topk=4,
        dsa_indexer_loss_coeff=1.0,
        **ON_CPU,
    )
    # Queries and keys of the indexer are rotated alike, which no product of the two shows.
    with (
        mock.patch.object(dsa, "rotate_activation", lambda tensor: tensor),
        mock.patch.object(torch.distributed, "all_reduce", _with_means(torch.distributed.all_reduce)),
    ):
        attention = Attention(config, dsa)
        before = {name: weight.detach().clone() for name, weight in attention.named_parameters()}
        train_layer(attention, (TOKENS, BATCH, HIDDEN), steps=STEPS, rate=RATE)
    return {name: (before[name], weight.detach() - before[name]) for name, weight in attention.named_parameters()}


@proof("an indexer trains {:.1e} off", bound=1e-3, ranks=2)
def an_indexer_trains_as_on_one_rank(here: Here) -> float:
    """With sequence parallelism DSA's indexer trains with a gradient that is TP times too large.

    To reproduce: on two tensor-parallel ranks with `sequence_parallel` wrap a DSAttention in DistributedDataParallel.
    Run forward, backward, finalize_model_grads and a step of SGD, some times. Compare how the weights of the indexer
    have moved with one rank that has all heads. Linear layers and a norm in torch stand for Transformer Engine's, with
    the marks that TELinear and TENorm give.

    The indexer gathers the tokens of all ranks, so each rank has the whole gradient. The duplicated linear layers and
    the norm are marked sequence_parallel, as if a rank had that of its own tokens, and finalize_model_grads adds them.

    Right is how one rank trains. From 0.16 to 0.18; 0.19 takes the mean over ranks.
    """
    truth = here.run(trained, False)[0]
    worst = 0.0
    for sequence_parallel in (False, True):
        layout = Layout(tp=here.world, sequence_parallel=sequence_parallel)
        for found in here.run(trained, sequence_parallel, layout=layout):
            for name, (_, moved) in found.items():
                worst = max(worst, float((moved - truth[name][1]).norm() / truth[name][1].norm()))
    return worst

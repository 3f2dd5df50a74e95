"""Proofs of mrope-thd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof

LENGTHS = (8, 8, 8)  # multiples of four, so that two ranks can cut each by zigzag
VOCABULARY = 64
SECTION = [2, 1, 1]  # of the four angles of a head: time, height, width


def build(**overrides: Any) -> Any:
    return testing.build_gpt(
        **{
            "mtp_num_layers": None,
            "position_embedding_type": "mrope",
            "mrope_section": SECTION,
            "num_layers": 1,
            "vocab_size": VOCABULARY,
            **overrides,
        }
    )


def positions(length: int, text: int) -> Tensor:
    """Of a sequence: time, height and width, [3, length]. After `text` tokens comes an image of two by two."""
    image = text + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    before = torch.arange(text).expand(3, -1)
    after = torch.arange(text + 2, length - 2).expand(3, -1)
    return torch.cat([before, image, after], 1)


def row_of(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """ids and labels, [1, T], and the positions, [3, 1, T], of sequences one after another."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, sum(lengths)), generator=generator)
    labels = torch.randint(VOCABULARY, (1, sum(lengths)), generator=generator)
    places = torch.cat([positions(length, 1 + number) for number, length in enumerate(lengths)], 1)
    return ids, labels, places[:, None]


def own(length: int, start: int = 0) -> Tensor:
    """Where the tokens of a sequence stand in the row that this context-parallel rank holds."""
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = torch.arange(start, start + length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def packed_of(lengths: tuple[int, ...]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def gradients(model: Any, loss: Tensor) -> Tensor:
    """Of all weights, in one vector."""
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]).double()


Parts = tuple[Tensor, Tensor, Tensor]  # where tokens stand in the row [t], their losses [t], gradients of all weights


def packed(lengths: tuple[int, ...], overrides: dict[str, Any]) -> Parts:
    """The part of a packed row that this rank holds. The positions are those of the whole row."""
    model = build(**overrides)
    ids, labels, places = row_of(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    here = torch.cat([own(length, start) for length, start in zip(lengths, starts, strict=False)])
    losses = model(ids[:, here], places, None, labels=labels[:, here], packed_seq_params=packed_of(lengths))
    return here, losses.detach()[0], gradients(model, losses.sum())


def unpacked(lengths: tuple[int, ...], overrides: dict[str, Any]) -> Parts:
    """The part of each sequence alone that this rank holds."""
    model = build(**overrides)
    ids, labels, places = row_of(lengths)
    losses, held, start = [], [], 0
    for length in lengths:
        here = own(length, start)
        whole = places[..., start : start + length]
        losses.append(model(ids[:, here], whole, None, labels=labels[:, here])[0])
        held.append(here)
        start += length
    together = torch.cat(losses)
    return torch.cat(held), together.detach(), gradients(model, together.sum())


def error(found: list[Parts], truth: Parts) -> float:
    """How far the ranks' losses and gradients are from the truth: the largest loss, and the norm of the gradients."""
    held, expected, gradient = truth
    right = torch.empty_like(expected)
    right[held] = expected
    losses = max(float((losses - right[held]).abs().max()) for held, losses, _ in found)
    total = torch.stack([parts for _, _, parts in found]).sum(0)
    return max(losses, float((total - gradient).norm() / gradient.norm()))


def parallel(here: Here, function: Any, lengths: tuple[int, ...] = LENGTHS) -> float:
    (truth,) = here.run(unpacked, lengths, {})
    layout = Layout(cp=here.world)
    return error(here.run(function, lengths, {"context_parallel_size": here.world}, layout=layout), truth)


@proof(
    "losses or gradients off by {:.1e}",
    bound=1e-5,
    ranks=2,
    crashes=r"^RuntimeError: shape '.*' is invalid for input of size",
)
def packed_rows_with_multimodal_positions_on_context_parallel_ranks(here: Here) -> float:
    """Multimodal rotary embeddings (mrope) of packed rows (THD) are those of other tokens under context parallelism.

    To reproduce: on two context-parallel ranks call a GPTModel with `position_embedding_type="mrope"` on a packed row
    of three sequences of eight tokens: `position_ids` [3, 1, 24] of the whole row, and PackedSeqParams with
    `qkv_format="thd"`. Compare the losses per token, and the gradients of their sum, with those of each sequence alone
    on one rank.

    MultimodalRotaryEmbedding.forward cuts its table for the rank as if the row were one sequence. The rotation of
    packed rows then cuts it again, sequence by sequence. RotaryEmbedding leaves the table of a packed row whole
    (`packed_seq`); MultimodalRotaryEmbedding does not. A sequence that is longer than a rank's part of the row crashes.
    In 0.12 the table is cut in the wrong dimension, which crashes. From 0.12 on.
    """
    return parallel(here, packed)


@proof("losses or gradients off by {:.1e}", bound=1e-5, variants=["v0_12", "v0_13"])
def packed_rows_with_multimodal_positions_on_one_rank(here: Here) -> float:
    """Multimodal rotary embeddings (mrope) of packed rows (THD) are those of the first sequence for all.

    To reproduce: call a GPTModel with `position_embedding_type="mrope"` on a packed row of three sequences of eight
    tokens: `position_ids` [3, 1, 24] of the whole row, and PackedSeqParams with `qkv_format="thd"`. Compare the losses
    per token, and the gradients of their sum, with those of each sequence alone.

    The table of MultimodalRotaryEmbedding has a row for each token. _apply_rotary_pos_emb_thd takes it for one with a
    row for each position, and begins with its first row in every sequence. From 0.12 to 0.14.
    """
    (truth,) = here.run(unpacked, LENGTHS, {})
    return error(here.run(packed, LENGTHS, {}), truth)


@proof(
    "losses or gradients off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: shape '.*' is invalid for input of size",
    variants=["v0_12"],
)
def rows_with_multimodal_positions_on_context_parallel_ranks(here: Here) -> float:
    """Multimodal rotary embeddings (mrope) are cut in the wrong dimension under context parallelism.

    To reproduce: on two context-parallel ranks call a GPTModel with `position_embedding_type="mrope"` on a row of
    eight tokens, with `position_ids` [3, 1, 8]. Compare the losses per token with those on one rank.

    MultimodalRotaryEmbedding.forward asks get_pos_emb_on_this_cp_rank to cut dimension 1, which is that of the batch.
    It raises, or with four rows in the batch gives the tables of two of them. Right is dimension 0, that of the
    sequence. In 0.12; 0.13 cuts dimension 0.
    """
    return parallel(here, unpacked)

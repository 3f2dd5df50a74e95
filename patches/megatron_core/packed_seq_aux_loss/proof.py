"""Proof of packed-seq-aux-loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_router_losses import PER_TOKEN, model_of, of_routers, off_by
from shim.testing.packing import PackedRow
from shim.testing.proof import Here, proof
from shim.testing.schedules import run_microbatches

SEQUENCES: dict[str, Any] = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
LENGTHS = (13, 4, 7)


def places_of(row: PackedRow) -> Tensor:
    """The places in a packed row that this context-parallel rank has."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    places = []
    for (start, _), end in zip(row.spans, row.ends, strict=True):
        chunks = torch.arange(start, end).chunk(2 * size)
        places += [chunks[rank], chunks[-1 - rank]] if size > 1 else [torch.arange(start, end)]
    return torch.cat(places)


def step(wrapped: Any, rows: Sequence[PackedRow], packed: bool) -> None:
    """A step of the release's schedule on rows as microbatches, with no loss of tokens.

    wrapped: a model in DistributedDataParallel, or a list of a rank's virtual stages.
    """
    from megatron.core.distributed import finalize_model_grads

    chunks = wrapped if isinstance(wrapped, list) else [wrapped]
    config: Any = chunks[0].config
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.variable_seq_lengths = len({row.total for row in rows}) > 1
        chunk.zero_grad_buffer()

    def forward(row: PackedRow, chunk: Any) -> tuple[Tensor, Any]:
        places = places_of(row)
        valid = row.valid if testing.release().startswith("0.12.") else row.valid[places]  # of all ranks in 0.12

        def loss_func(losses: Tensor) -> tuple[Any, ...]:
            nothing = (losses * 0).sum()
            return (nothing, valid.sum().int(), {}) if config.calculate_per_token_loss else (nothing, {})

        ids, positions, labels = (tensor[:, places] for tensor in (row.input_ids, row.position_ids, row.labels))
        given = {"packed_seq_params": row.packed_seq_params()} if packed else {}
        return chunk(ids, positions, None, labels=labels, **given), loss_func

    with eager():
        run_microbatches(wrapped, rows, forward, max(row.total for row in rows))


def alone(options: Mapping[str, Any]) -> Tensor:
    """The gradients of all routers after a step in which each sequence is a microbatch."""
    wrapped = model_of({**SEQUENCES, **options})
    step(wrapped, [testing.pack([sequence]) for sequence in testing.random_sequences(LENGTHS)], packed=False)
    return of_routers(wrapped)


def in_a_row(options: Mapping[str, Any], align: int = 1) -> Tensor:
    """The same after a step on one packed row."""
    wrapped = model_of({**SEQUENCES, **options})
    step(wrapped, [testing.pack(testing.random_sequences(LENGTHS), align=align)], packed=True)
    return of_routers(wrapped)


@proof("gradient of routers off by {:.1e}", bound=1e-5)
def a_packed_row_balances_each_of_its_sequences(here: Here) -> float:
    """The sequence auxiliary loss of MoE takes a packed row for one sequence.

    To reproduce: build a GPTModel with `num_moe_experts=4`, `moe_router_load_balancing_type="seq_aux_loss"` and
    `moe_aux_loss_coeff=0.1`. Run a step of `get_forward_backward_func()` with `finalize_model_grads` and a loss
    function that returns zero, so that the gradient of the routers is that of their own losses alone. Do so with
    sequences of 13, 4 and 7 tokens as three microbatches, and with one row of all three and its `packed_seq_params`.

    The router reads the number of sequences from the shape of its logits, which is 1 for a packed row. Right is the
    gradient of the sequences alone: the loss is a mean over sequences. From 0.12 to 0.19.
    """
    return off_by(here.run(in_a_row, {})[0], here.run(alone, {})[0])


@proof("gradient of routers off by {:.1e}", bound=1e-5)
def so_it_does_with_padding_and_a_loss_per_token(here: Here) -> float:
    """The same with padding between sequences and calculate_per_token_loss.

    To reproduce: as above with `calculate_per_token_loss=True`, and sequences padded to multiples of 4 with
    `cu_seqlens_q_padded`. Right is the gradient of the sequences alone: each counts with its tokens, and padding is in
    none.
    """
    return off_by(here.run(in_a_row, PER_TOKEN, 4)[0], here.run(alone, PER_TOKEN)[0])

"""Proof of loss-token-count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.testing import Layout
from shim.testing.proof import Here, proof

TOKENS = 16
MODEL: dict[str, Any] = {"num_layers": 2, "mtp_num_layers": None}
# The first tokens of each row are a prompt, without a loss. On two ranks with context parallelism the first one has
# tokens 0 to 3 and 12 to 15. So 7 and 8 tokens count in the first row, 4 and 2 in the second.
PROMPTS = (1, 10)


def places_of_rank() -> Tensor:
    """The places in a row, [s], that this context-parallel rank has: one chunk from its front and one from its end."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = torch.arange(TOKENS).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if size > 1 else torch.arange(TOKENS)


def rows_of_rank(prompts: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels and loss mask, [1, s] each, of each row of this data-parallel rank."""
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    rows = torch.randint(0, 64, (len(prompts), TOKENS + 1), generator=torch.Generator().manual_seed(0))
    places = places_of_rank()
    found = [
        (row[None, places], row[None, places + 1], (places >= prompt).float()[None])
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    return found[rank::ranks]


def wrapped_model(**options: Any) -> Any:
    """A GPTModel for the initialised layout, in DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    model: Any = testing.build_gpt(**{**MODEL, **options})
    model.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def step(wrapped: Any, prompts: Sequence[int] = PROMPTS, forward_only: bool = False) -> list[dict[str, Tensor]]:
    """A step of the release's schedule and the sums over ranks. Returns what each microbatch has logged."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[tuple[Tensor, ...]], chunk: Any) -> tuple[Tensor, Any]:
        tokens, labels, mask = next(data)

        def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, count = (losses * mask).sum(), mask.sum().int()
            # The first shares its storage with the loss, and is divided with it.
            return loss, count, {"loss": loss.detach(), "sum": loss.detach().clone(), "count": count}

        return chunk(tokens, places_of_rank()[None], None, labels=labels), loss_func

    rows = rows_of_rank(prompts)
    wrapped.zero_grad_buffer()
    logged: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows),
        model=wrapped,
        num_microbatches=len(rows),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return logged


def gradient(options: Mapping[str, Any], prompts: Sequence[int] = PROMPTS) -> Tensor:
    """The gradients of all weights after a step, in one vector of fp64."""
    wrapped = wrapped_model(**options)
    step(wrapped, prompts)
    return torch.cat([weight.main_grad.double().flatten() for weight in wrapped.parameters()])


def off_by(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@proof("gradient off by {:.1e}", bound=5e-6, ranks=2, options={"sum_over_cp": True})
def a_count_of_the_ranks_own_tokens_trains_like_one_rank(here: Here) -> float:
    """A loss function with three values trains another model under context parallelism than on one rank.

    To reproduce: build a GPTModel in DistributedDataParallel. Run a step of `get_forward_backward_func()` with
    `finalize_model_grads`, on rows whose first tokens are masked, with a loss function that returns the sum of the
    masked losses, the number of its tokens that count, and what is logged, as that of pretrain_gpt does. Leave
    `calculate_per_token_loss` at False. Do the same on two ranks with `context_parallel_size=2`. The gradients are
    others.

    forward_step (forward_step_calc_loss from 0.14 on) divides the sum of a rank by its own count, and
    DistributedDataParallel averages over context-parallel ranks. That is the mean over ranks of their means, where one
    rank has the mean over tokens. Right is the gradient of one rank.

    From 0.13 to 0.20. Megatron-LM pull request 7513 is open. 0.12 wants the count of all ranks, and multiplies by the
    number of ranks: with the count of a rank the gradient is too large by that number.
    """
    truth: Tensor = here.run(gradient, {})[0]
    return max(off_by(found, truth) for found in here.run(gradient, {}, layout=Layout(cp=here.world)))

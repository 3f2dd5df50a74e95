"""Losses of routers on several layouts, for the proofs of their scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shim import testing
from shim.patches.megatron_core._proof_experts import eager
from shim.patches.megatron_core._proof_features import need_padding_mask
from shim.testing import Layout
from shim.testing.proof import Here

# The loss of the tokens is multiplied by zero, so that what is left of a router's gradient is that of its own losses.
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}

AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
GLOBAL: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}

PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
ROWS, TOKENS = 2, 8


def places_of_rank() -> Tensor:
    """The places in a row, [s], that this context-parallel rank has: one chunk from its front and one from its end."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = torch.arange(TOKENS).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if size > 1 else torch.arange(TOKENS)


def of_rank(rows: Tensor) -> Tensor:
    """What this data-parallel rank has of something with a value for each row."""
    from megatron.core import parallel_state

    return rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]


def step(wrapped: Any, padding: Sequence[int] = (), micro_batch_size: int = 1, **inputs: Any) -> None:
    """A step of the release's schedule and the sums over ranks, with no loss of tokens.

    padding: how many tokens at the end of each of the rows are padding; () for a step without a mask.
    inputs: further arguments of the model.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if padding:
        need_padding_mask()
    config, places = wrapped.config, places_of_rank()
    config.finalize_model_grads_func = finalize_model_grads
    rows = of_rank(torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)))
    ends = of_rank(TOKENS - torch.tensor(padding or [0] * ROWS))

    def forward_step(data: Iterator[tuple[Tensor, Tensor]], chunk: Any) -> tuple[Tensor, Any]:
        tokens, end = next(data)
        tokens, mask = tokens[:, places], places >= end[:, None]
        given = {"padding_mask": mask} if padding else {}
        # 0.12 wants the count of all context-parallel ranks.
        count = end.sum().int() if testing.release().startswith("0.12.") else (~mask).sum().int()

        def loss_func(losses: Tensor) -> tuple[Any, ...]:
            nothing = (losses * 0).sum()
            return (nothing, count, {}) if config.calculate_per_token_loss else (nothing, {})

        return chunk(tokens, places.expand_as(tokens), None, labels=tokens, **given, **inputs), loss_func

    microbatches = list(zip(rows.split(micro_batch_size), ends.split(micro_batch_size), strict=True))
    wrapped.zero_grad_buffer()
    with eager():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=wrapped,
            num_microbatches=len(microbatches),
            seq_length=TOKENS,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )


def model_of(options: Mapping[str, Any]) -> Any:
    """A GPTModel with experts for the initialised layout, in DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    cut = parallel_state.get_tensor_model_parallel_world_size() > 1
    model: Any = testing.build_gpt(**{**MODEL, "sequence_parallel": cut, **options})
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def of_routers(wrapped: Any) -> Tensor:
    """The gradients of all routers, in one vector."""
    weights = [weight for name, weight in wrapped.named_parameters() if name.endswith("router.weight")]
    return torch.cat([weight.main_grad.flatten() for weight in weights]).clone()


def gradient(options: Mapping[str, Any], padding: Sequence[int] = ()) -> Tensor:
    """The gradients of all routers after a step."""
    wrapped = model_of(options)
    step(wrapped, padding)
    return of_routers(wrapped)


def off_by(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def error(here: Here, layout: Layout, options: Mapping[str, Any], padding: Sequence[int] = ()) -> float:
    """How far the gradients of the routers are from those of one rank alone, on the worst rank."""
    truth = here.run(gradient, options, padding)[0]
    return max(off_by(found, truth) for found in here.run(gradient, options, padding, layout=layout))

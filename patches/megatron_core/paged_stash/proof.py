"""Proofs of paged-stash: what experts keep without it, and where upstream's own stash fails."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shim import ShimError, testing
from shim.patches.megatron_core.paged_stash.grouped_on_cpu import EXPERTS, grouped, sequential, te_grouped
from shim.patches.megatron_core.paged_stash.upstream_on_cpu import (
    STASH,
    STEP,
    build,
    equal_bits,
    evaluate,
    fused_experts,
    fused_gradients,
    interpreted_kernels,
    run_twice,
    settings,
    train,
    upstream,
)
from shim.testing.cpu import unwritten_memory_is_nan
from shim.testing.proof import CannotRunError, Here, proof

# A real model, whose experts compute in buffers of a fixed capacity

TOKENS = 18  # of each of the two sequences of a microbatch
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "mtp_num_layers": None,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": True,  # else the router of one expert per token is not trained
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "moe_expert_capacity_factor": 2.0,
    "moe_pad_expert_input_to_capacity": True,
}
# Buffers with four rows to a token.
EMPTY_ROWS: dict[str, Any] = {
    **MODEL,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 128,
    "moe_expert_capacity_factor": 4.0,
}
PREFIX = "moe_paged_stash"


def configs(*modules: nn.Module) -> list[Any]:
    """Every config that any module holds, once: those of experts are copies."""
    found = (getattr(m, "config", None) for module in modules for m in module.modules())
    return list({id(config): config for config in found if config is not None}.values())


@contextlib.contextmanager
def flags(modules: Sequence[nn.Module], page_size: int = 4, **values: float) -> Iterator[None]:
    """The config's flags of all these modules, set as by somebody who writes them there on any release."""
    values = {"page_size": page_size, **values}
    with contextlib.ExitStack() as undo:
        for config in configs(*modules):
            for name, value in {PREFIX: True, **{f"{PREFIX}_{key}": value for key, value in values.items()}}.items():
                had = hasattr(config, name)
                undo.callback(*((setattr, config, name, getattr(config, name)) if had else (delattr, config, name)))
                setattr(config, name, value)
        yield


def loss_of(model: nn.Module, microbatch: int) -> Tensor:
    """The loss of a microbatch; its number is the seed of its tokens."""
    generator = torch.Generator().manual_seed(microbatch)
    ids = torch.randint(0, 64, (2, TOKENS), generator=generator)
    loss: Tensor = model(ids, torch.arange(TOKENS).expand(2, -1), None, labels=ids.roll(-1, 1)).mean()
    return loss


def held_between(stash: bool, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """Bytes held between forward and backward of a microbatch, pools included, and the gradients at the step's end.

    A stash learns its size in a step before that.
    """
    from megatron.core.distributed import finalize_model_grads

    model: Any = testing.build_gpt(**{**EMPTY_ROWS, **options})
    model.finish_grad_sync = lambda **options: None  # as of a model without replicas
    held = 0
    with testing.Footprint() as footprint, contextlib.ExitStack() as undo:
        if stash:
            undo.enter_context(flags([model], page_size=1, buffer_size_factor_cuda=-1.0))
        for _ in range(1 + stash):
            model.zero_grad()
            loss = loss_of(model, 0)
            held = footprint.held_bytes
            loss.backward()
            finalize_model_grads([model])
    return held, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def times_what_tokens_take(experts: Callable[[], AbstractContextManager[dict[str, Any]]]) -> float:
    """With the stash asked for, over buffers that have no empty rows."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP

    if "permuted_probs" not in inspect.signature(SequentialMLP.forward).parameters:
        raise CannotRunError("experts of this release are not told which rows are padding")
    # 0.16 looks it up in every step, and has it with Transformer Engine only.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True), experts() as options:
        needed, _ = held_between(False, moe_pad_expert_input_to_capacity=False, **options)
        _, right = held_between(False, **options)
        held, found = held_between(True, **options)
    if not equal_bits(found, right):
        raise RuntimeError("the stash has changed gradients")
    return held / needed


# A tenth is for the lists of pages, here of one row each.
@proof("holds {:.2f} times the bytes of its tokens", bound=1.2, defect="missing")
def empty_rows_of_experts_take_no_memory(here: Here) -> float:
    """Experts keep the empty rows of their buffers for backward.

    To reproduce: build a GPTModel with `num_moe_experts=8`, `moe_router_topk=2`, `moe_expert_capacity_factor=4.0` and
    `moe_pad_expert_input_to_capacity=True`, whose experts have no fused operations (SequentialMLP). Count the bytes
    that are held between forward and backward, and those of the same model with
    `moe_pad_expert_input_to_capacity=False`, which drops the same tokens and has no empty rows.

    Every buffer has four times the rows that have a token, and autograd keeps them all. Right is what the rows with
    tokens take. From 0.18 `moe_paged_stash` stashes these rows only, but for fused operations alone; there too nothing
    changes here. Up to 0.17 there is no stash.
    """
    times: float = here.run(times_what_tokens_take, sequential)[0]
    return times


@proof("holds {:.2f} times the bytes of its tokens", bound=1.2, defect="missing")
def empty_rows_of_grouped_experts_take_no_memory(here: Here) -> float:
    """Grouped experts without fused operations keep the empty rows of their buffers for backward, too.

    To reproduce: run the model of the other proof with TEGroupedMLP. Torch takes the place of the grouped kernels, and
    keeps what they keep. Right is what the rows with tokens take.
    """
    times: float = here.run(times_what_tokens_take, te_grouped)[0]
    return times


@proof("holds {:.2f} times the bytes of its tokens", bound=1.2, defect="missing", variants=("v0_12_1",))
def empty_rows_of_legacy_grouped_experts_take_no_memory(here: Here) -> float:
    """The grouped experts of releases up to 0.16 keep the empty rows of their buffers for backward, too.

    To reproduce: run the model of the first proof with GroupedMLP (`moe_use_legacy_grouped_gemm`). Torch takes the
    place of the kernels of grouped_gemm, and keeps what they keep. Right is what the rows with tokens take.
    """
    if not hasattr(import_module(EXPERTS), "GroupedMLP"):
        raise CannotRunError("this release has no GroupedMLP")
    times: float = here.run(times_what_tokens_take, grouped)[0]
    return times


@contextlib.contextmanager
def new_manager() -> Iterator[None]:
    """Upstream's stash as in a new process, on a CPU."""
    if find_spec(STASH) is None:
        raise CannotRunError("this release has no paged stash")
    if find_spec("triton") is None:
        raise CannotRunError("upstream's stash needs triton, which is not installed")
    with contextlib.ExitStack() as entered:
        entered.enter_context(mock.patch.object(upstream().PagedStashManager, "STASH_MGR", None))
        entered.enter_context(interpreted_kernels())
        entered.enter_context(unwritten_memory_is_nan())
        yield


def wrong_gradients(found: dict[str, Tensor], right: dict[str, Tensor]) -> int:
    return sum(not torch.equal(found[name], right[name]) for name in right)


def wrong_after_an_overflow() -> int:
    """In the second iteration, with a buffer for half of what the first one took."""
    with new_manager():
        model, counts = build(), (5, 5, 5)
        found = {}
        for _ in range(2):
            found = train(model, counts, config=settings(factor=-0.5))
        return wrong_gradients(found, train(model, counts, stash=False))


@proof("{:.0f} of 4 gradients wrong", right="bit-equal", variants=("v0_18",))
def gradients_survive_a_full_buffer(here: Here) -> int:
    """The paged stash silently corrupts gradients when its buffer is full.

    To reproduce: two layers of experts that stash as TEGroupedMLP does, by paged_stash_group_start,
    get_paged_stash_context and paged_stash_group_commit, with `moe_paged_stash_buffer_size_factor_cuda=-0.5`. Run two
    iterations of three microbatches, two of them in flight, and compare the gradients of the second with those without
    a stash. The buffer takes the first stash and no other.

    An overflowing tensor is neither kept nor stored: backward reads unwritten memory, and everything stashed before the
    overflow is also lost. Only PagedStashRunner asks check_paged_stash_overflow and repeats the step. In every other
    loop nothing tells. Right are the gradients without a stash: a tensor that does not fit can stay where it is.

    From 0.18 to 0.20. Open upstream.
    """
    wrong: int = here.run(wrong_after_an_overflow)[0]
    return wrong


def wrong_after_an_evaluation() -> int:
    with new_manager():
        model, counts = build(), (5, 3)
        with torch.no_grad():
            evaluate(model, counts)
        found = {}
        for _ in range(2):
            found = train(model, counts)
        return wrong_gradients(found, train(model, counts, stash=False))


@proof(
    "{:.0f} of 4 gradients wrong",
    right="bit-equal",
    defect="crash",
    crashes=r"^AssertionError: schedule \d+ != \d+$",
    variants=("v0_18",),
)
def an_evaluation_may_come_before_the_first_step(here: Here) -> int:
    """The paged stash fails if an evaluation comes before the first training step.

    To reproduce: two layers of experts that stash as TEGroupedMLP does. Run an evaluation of two microbatches, that is
    paged_stash_reset(enabled=False) and forward passes, then two training iterations.

    PagedStashManager records the pipeline schedule in the first iteration and counts the microbatches of the evaluation
    in. The second iteration has another schedule and ends in an AssertionError. So does one with another number of
    microbatches. Right are the gradients without a stash: pages have no order.

    From 0.18 to 0.20. Open upstream.
    """
    wrong: int = here.run(wrong_after_an_evaluation)[0]
    return wrong


# Upstream's own stash


def wrong_in_fused_experts() -> int:
    """In the second iteration, with a buffer for half of what the first one took."""
    with new_manager():
        experts, counts = fused_experts()(settings(factor=-0.5)), (5, 5, 5)
        found = {}
        for _ in range(2):
            found = fused_gradients(experts, counts, stash=True)
        return wrong_gradients(found, fused_gradients(experts, counts, stash=False))


@proof("{:.0f} of 2 gradients wrong", right="bit-equal", variants=("v0_18",))
def gradients_of_fused_experts_survive_a_full_buffer(here: Here) -> int:
    """The paged stash silently corrupts gradients of TEGroupedMLP when its buffer is full.

    To reproduce: the other proof of a full buffer, with a TEGroupedMLP under `use_transformer_engine_op_fuser`. Its
    `_fused_forward` stashes. The fused operations need a GPU, and are stood in. Right are the gradients without a
    stash.

    From 0.18 to 0.20. Open upstream.
    """
    wrong: int = here.run(wrong_in_fused_experts)[0]
    return wrong


def drawn_anew() -> int:
    """Random tensors of a repeated step that are other ones: of the default generator, and of megatron's tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw() -> tuple[Tensor, Tensor]:
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(4)
        return torch.rand(4), forked

    with new_manager():
        config = settings()
        first, second = run_twice(draw, config, config)
        return sum(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


@proof("{:.0f} of 2 random tensors are other ones", right="the same random numbers", variants=("v0_18",))
def a_repeated_step_draws_the_same_random_numbers(here: Here) -> int:
    """PagedStashRunner repeats a step with other random numbers, so that the step has another dropout.

    To reproduce: let PagedStashRunner run a `forward_backward_func` that draws random numbers, with a token dispatcher
    whose `check_over_budget()` is true once. `prepare_for_rerun` restores no random state. Right are the numbers of the
    first try, with which the step is the one that was asked for.

    From 0.18 to 0.20. Open upstream.
    """
    others: int = here.run(drawn_anew)[0]
    return others


def by_finalizing(model: nn.ModuleList, step: Callable[[], Any]) -> None:
    """The end of a step without a CUDA graph."""
    from megatron.core.distributed import finalize_model_grads

    step()
    whole: Any = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    whole.finish_grad_sync = lambda **options: None
    finalize_model_grads([whole])


def by_a_graph(model: nn.ModuleList, step: Callable[[], Any]) -> None:
    """The end of a step that is to be captured, while it warms up."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    # It counts the iterations of all its instances, and captures the second.
    with mock.patch.dict(FullCudaGraphWrapper.curr_iteration, training=0):
        FullCudaGraphWrapper(lambda **_: step())(model=[model], data_iterator=None, **STEP)


def says_nothing(end: Callable[[nn.ModuleList, Callable[[], Any]], None]) -> bool:
    """Whether a step whose buffer was too small ends without an error, although its gradients are wrong."""
    with new_manager():
        model, counts, found = build(), (5, 5, 5), {}
        right = train(model, counts, stash=False)
        train(model, counts, config=settings(factor=-0.5))  # from which the stash learns its size

        def step() -> None:
            found.update(train(model, counts, config=settings(factor=-0.5)))

        try:
            end(model, step)
        except ShimError:
            return False
        return not equal_bits(found, right)


def ends_that_say_nothing() -> int:
    return sum(says_nothing(end) for end in (by_finalizing, by_a_graph))


@proof(
    "{:.0f} of 2 steps with wrong gradients end without an error",
    right="wrong gradients are an error",
    variants=("v0_18",),
    options={"overflow": "raise"},
)
def a_full_buffer_is_an_error_at_the_end_of_the_step(here: Here) -> int:
    """Nothing tells that the paged stash has lost tensors, unless PagedStashRunner runs the step.

    To reproduce: two iterations of toy experts whose buffer is full, as in another proof. End the second one by
    `finalize_model_grads`, and once more inside FullCudaGraphWrapper. The gradients are wrong, and are used. Nothing
    but PagedStashRunner calls `check_paged_stash_overflow`. Right is an error before gradients are used, if nothing but
    the stash may hold them (the option `overflow` is "raise" here).

    From 0.18 to 0.20. Open upstream.
    """
    silent: int = here.run(ends_that_say_nothing)[0]
    return silent

"""A paged stash for the activations of experts that never corrupts gradients: shim.ops.PagedStash.

What is wrong with upstream's stash (0.18 to 0.20):
- It records the pipeline schedule in its first iteration and asserts the same schedule afterwards. Evaluation before
  training, another number of microbatches, a microbatch after the 999th, and an exception in an expert all end in an
  AssertionError.
- One overflow spoils everything stashed before it. Only PagedStashRunner checks for overflow; in any other loop the
  gradients are silently wrong. The buffer is sized in tokens but spent in pages.
- Tensors without Transformer Engine's marks are silently not stashed.
- The runner repeats a step with other random numbers. Up to 0.19 it leaves the stash on in layers with a separate
  config.
- Pipeline schedules cannot be imported without triton.

The patch keeps upstream's functions and flags, and puts another stash behind them. In it every saved tensor owns its
pages and its flag, and microbatches may come in any order. On overflow the stash keeps the original (option overflow).
While a CUDA graph is captured it cannot: then PagedStashRunner repeats the step, or an error is raised before gradients
are used. Experts without the fused operations are stashed too, if their buffers have spare rows.

0.12.1 to 0.17 get the same stash as a backport. In those releases only moe_pad_expert_input_to_capacity makes oversized
buffers. Without that flag only a host pool saves anything, and forward passes do not change. The patch reads the flags
from the config if somebody has set them there, else from the options. The same holds from 0.18 on, where a field
with its default value counts as not set. 0.12.0 does not pass the router's probabilities to the experts, so nobody can
tell which rows are padding.

Who calls what, in the order of one step. "Upstream" is what releases from 0.18 on call. Up to 0.17 only the three rows
with a star exist. The methods on the right belong to ExpertStash (`experts`), of which each apply() makes one:

    when                   upstream                              here
    ---------------------  ------------------------------------  --------------------------------------------------
    a step begins          paged_stash_reset                     step_begins: sizes pools; off while evaluating
    experts run, fused     TEGroupedMLP._fused_forward           enter_module: whose settings they are
                             paged_stash_group_start               begin: notes the inputs
                             with get_paged_stash_context          open: a StashGroup, which sees what autograd saves
                               the fused operations
                             paged_stash_group_commit              commit: copies what is on the way to the output
                                                                     into pages; the originals are let go
                                                                 leave_module
    * experts run, plain   (TE)GroupedMLP, MLP .forward          run: open, upstream's forward, commit
    * their backward       autograd asks for what it saved       PagedStash: copies rows back, frees their pages
    * a step ends          finalize_model_grads; from 0.18 on    step_ends: an error if tensors were lost, unless a
                           FullCudaGraphWrapper.__call__ too       runner is there that repeats the step
    a runner repeats it    PagedStashRunner.__call__             keeps the state of all random numbers
                             check_paged_stash_overflow            overflowed: asks all pools
                             check_paged_stash_host_spill          spilled: asks all host pools
                             prepare_for_rerun                     forget_overflow; random numbers as before; no
                                                                     stash until the repetition is over
    graphs are dropped     release_stash_buffers                 release: drops all pools

paged_stash_init_chunk_handler, which announces the next chunk of the schedule, does nothing here.

Upstream: Megatron-LM #2690, #4247; the toggling on a rerun #6419. Delete when upstream's stash has these properties.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shim._resources import Bindings, Resource
from shim.ops.paged_stash import StashStatistics
from shim.patches._arguments import Function, argument
from shim.patches._stubs import holder_of
from shim.patches.megatron_core.paged_stash.experts import FLAG, ExpertStash, cannot_gain, check_settings, total_of

EXPERTS = "megatron.core.transformer.moe.experts:"
MLP = "megatron.core.transformer.mlp:MLP.forward"
GROUPED = EXPERTS + "GroupedMLP.forward"
TE_GROUPED = EXPERTS + "TEGroupedMLP.forward"
FUSED = EXPERTS + "TEGroupedMLP._fused_forward"
STASH = "megatron.core.transformer.moe.paged_stash:"
FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
GRAPH = "megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__"

FUSED_ASK_THE_CONFIG = "the fused operations of upstream ask the config for moe_paged_stash, and no option"

Factory = Callable[..., Function]  # of upstream's function and the stash

_STASHES: weakref.WeakSet[ExpertStash] = weakref.WeakSet()


def statistics() -> StashStatistics:
    """The outcomes of experts' saved tensors since the patch was applied. Waits for the device."""
    return total_of(stash.statistics() for stash in list(_STASHES))


# Experts without the fused operations


def _grouped(original: Function, stash: ExpertStash) -> Function:
    hidden = argument(original, "permuted_local_hidden_states")
    probs = argument(original, "permuted_probs")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = (self, *args)
        if not stash.wanted(self.config):
            return original(*call, **kwargs)
        if _is_fused(self):
            if not getattr(self.config, FLAG, False):
                stash.skip(self, FUSED_ASK_THE_CONFIG)
            return original(*call, **kwargs)
        run = functools.partial(original, *call, **kwargs)
        return stash.run(run, self, hidden(call, kwargs), probs(call, kwargs))

    return forward


def _mlp(original: Function, stash: ExpertStash) -> Function:
    """An MLP gets the probabilities of its tokens only from SequentialMLP."""
    hidden, scale = argument(original, "hidden_states"), argument(original, "per_token_scale")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = (self, *args)
        probs = scale(call, kwargs)
        if probs is None or not stash.wanted(self.config):
            return original(*call, **kwargs)
        return stash.run(functools.partial(original, *call, **kwargs), self, hidden(call, kwargs), probs)

    return forward


# Upstream's functions


def _fused_forward(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def _fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = stash.enter_module(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            stash.leave_module(outer)

    return _fused_forward


def _group_start(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_group_start(tensor: Tensor) -> Tensor:
        stash.begin(tensor)
        return tensor

    return paged_stash_group_start


def _context(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def get_paged_stash_context(
        name: str | None = None,
        max_num_tokens: int | None = None,
        num_tokens_tensor: Tensor | None = None,
        avg_num_tokens: int | None = None,
    ) -> Any:
        return stash.open(max_num_tokens, num_tokens_tensor, avg_num_tokens)

    return get_paged_stash_context


def _group_commit(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_group_commit(tensor: Tensor, name: str | None = None) -> Tensor:
        stash.commit(tensor)
        return tensor

    return paged_stash_group_commit


def _chunk(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_init_chunk_handler(vp_size: int | None, vp_stage: int | None) -> None:
        """Does nothing: the stash expects no order of chunks."""

    return paged_stash_init_chunk_handler


def _reset(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def paged_stash_reset(enabled: bool = True, config: Any = None) -> None:
        stash.step_begins(enabled, config)

    return paged_stash_reset


def _overflow(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def check_paged_stash_overflow() -> Tensor:
        return stash.overflowed()

    return check_paged_stash_overflow


def _host_spill(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def check_paged_stash_host_spill() -> Tensor:
        return stash.spilled()

    return check_paged_stash_host_spill


def _release(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def release_stash_buffers(self: Any) -> None:
        original(self)
        stash.release()

    return release_stash_buffers


# The runner that repeats a step


def _runner(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, stash.random_state = stash.random_state, _random_state()
        stash.runners += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            stash.runners -= 1
            stash.random_state, stash.rerunning = outer, False

    return __call__


def _prepare_for_rerun(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def prepare_for_rerun(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stash.forget_overflow()
        stash.rerunning = True  # for all layers, also those with a separate config
        if stash.random_state is not None:
            stash.random_state()
        return result

    return prepare_for_rerun


def _random_state() -> Callable[[], None]:
    """Save the state of all random generators. Returns a function that restores it.

    States are copied. Generators of CUDA graphs stay the same objects, because the graphs reference them.
    """
    from megatron.core.tensor_parallel import random

    cpu = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracked = {
        name: (state, state.get_state() if isinstance(state, torch.Generator) else state.clone())
        for name, state in random.get_cuda_rng_tracker().get_states().items()
    }

    def restore() -> None:
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)
        for state, value in tracked.values():
            if isinstance(state, torch.Generator):
                state.set_state(value)
        states = {n: state if isinstance(state, torch.Generator) else value for n, (state, value) in tracked.items()}
        random.get_cuda_rng_tracker().set_states(states)

    return restore


# Before gradients are used


def _finalize(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        stash.step_ends()
        return original(*args, **kwargs)

    return finalize_model_grads


def _graph(original: Function, stash: ExpertStash) -> Function:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        stash.step_ends()  # a replayed graph calls no hook
        return result

    return __call__


EVERYWHERE: dict[str, Factory] = {MLP: _mlp, TE_GROUPED: _grouped, FINALIZE: _finalize}
UPSTREAM: dict[str, Factory] = {
    FUSED: _fused_forward,
    GRAPH: _graph,
    STASH + "paged_stash_group_start": _group_start,
    STASH + "get_paged_stash_context": _context,
    STASH + "paged_stash_group_commit": _group_commit,
    STASH + "paged_stash_init_chunk_handler": _chunk,
    STASH + "paged_stash_reset": _reset,
    STASH + "check_paged_stash_overflow": _overflow,
    STASH + "check_paged_stash_host_spill": _host_spill,
    STASH + "PagedStashManager.release_stash_buffers": _release,
    STASH + "PagedStashRunner.__call__": _runner,
    STASH + "PagedStashRunner.prepare_for_rerun": _prepare_for_rerun,
}
VARIANTS: dict[str, dict[str, Factory]] = {
    "grouped": {**EVERYWHERE, GROUPED: _grouped},
    "experts": EVERYWHERE,
    "manager": {**EVERYWHERE, **UPSTREAM},
}


def problems(models: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Pairs for shim.check(): why nothing is stashed, and the remedy. OptionError for settings that a step refuses."""
    modules = [
        m for model in models for m in model.modules() if getattr(getattr(m, "config", None), "num_moe_experts", 0)
    ]
    configs = {id(module.config): module.config for module in modules}.values()
    stashes = list(_STASHES)
    remedy = "set it in the config, or by shim.apply(options={'paged-stash': {'moe_paged_stash': True}})"
    asking = [(stash, config) for stash in stashes for config in configs if stash.asked(config)]
    for stash, config in asking:
        check_settings(stash.options, stash.settings(config))
    if not modules:
        yield "the model has no experts", "none is needed"
    elif not asking:
        yield "moe_paged_stash is not set", remedy
    else:
        reasons = [_reason(module, stash) for module in modules for stash in stashes if stash.asked(module.config)]
        if all(reasons):
            yield reasons[0], "see `shim explain paged-stash` for what gains by a stash"


def probe(module: Any, method: str, models: list[Any]) -> bool | str:
    """See docs/patch-modules.md. Upstream's shared experts have a forward of their own, and nothing to stash."""
    if not any(stash.asked(module.config) for stash in list(_STASHES)):
        return True
    if method == MLP and holder_of(module, "local_experts", models) is None:
        return True
    return "shim has no way to try experts on a tiny input"


def _is_fused(module: Any) -> bool:
    return bool(getattr(module, "_with_fused_impl", False))


def _reason(module: Any, stash: ExpertStash) -> str:
    """Why experts with such a config are not stashed; "" if they are."""
    if not _is_fused(module):
        return cannot_gain(module.config, stash.settings(module.config))
    return "" if getattr(module.config, FLAG, False) else FUSED_ASK_THE_CONFIG


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    stash = ExpertStash(options)
    _STASHES.add(stash)
    factories = {target: functools.partial(factory, stash=stash) for target, factory in VARIANTS[variant].items()}
    return Bindings(factories, Resource(stash.held, stash.release))

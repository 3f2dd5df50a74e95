"""A paged stash for the activations of experts that never corrupts gradients: shim.ops.PagedStash.

What is wrong with upstream's stash (0.18 to 0.20):
1. It records the pipeline schedule in its first iteration and asserts the same schedule afterwards. Evaluation before
   training, another number of microbatches, a microbatch after the 999th, and an exception in an expert all end in an
   AssertionError.
2. One overflow spoils everything stashed before it. Only PagedStashRunner checks for overflow; in any other loop the
   gradients are silently wrong. The buffer is sized in tokens but spent in pages.
3. Tensors without Transformer Engine's marks are silently not stashed.
4. The runner repeats a step with other random numbers. Up to 0.19 it leaves the stash on in layers with a separate
   config.
5. Pipeline schedules cannot be imported without triton.

The patch keeps upstream's functions and flags, and puts another stash behind them.
1. Every saved tensor owns its pages and its flag, and microbatches may come in any order.
2. On overflow the stash keeps the original (option overflow). While a CUDA graph is captured it cannot: then
   PagedStashRunner repeats the step, or an error is raised before gradients are used.
3. Experts without the fused operations are also stashed, if their buffers have spare rows.
4. A repeated step has the same random numbers, and no stash in any layer.
5. Without triton the schedules are imported with a stand-in for it (stand_ins.py).

0.12.1 to 0.17 get the same stash as a backport. In those releases only moe_pad_expert_input_to_capacity makes oversized
buffers. Without that flag only a host pool saves anything, and forward passes do not change. The patch reads the flags
from the config if they are set there, else from the options. The same holds from 0.18 on; there a field with its
default value counts as not set. 0.12.0 does not pass the router's probabilities to the experts, so the padding rows
cannot be told from the others.

The calls, in the order of one step. In the middle are the calls of releases from 0.18 on; up to 0.17 only the three
rows with a star exist. On the right are methods of ExpertStash (`experts`), of which each apply() makes one:

    file, when              upstream                              ExpertStash
    ----------------------  ------------------------------------  -------------------------------------------------
    upstream_calls:
      a step begins         paged_stash_reset                     step_begins: sizes pools; off while evaluating
      experts run, fused    TEGroupedMLP._fused_forward           enter_module: whose settings they are
                              paged_stash_group_start               begin: notes the inputs
                              with get_paged_stash_context          open: a StashGroup, which sees what autograd
                                the fused operations                  saves
                              paged_stash_group_commit              commit: copies what is on the way to the
                                                                      output into pages, and frees the originals
                                                                  leave_module
      a runner asks         check_paged_stash_overflow            overflowed: asks all pools
                            check_paged_stash_host_spill          spilled: asks all host pools
      graphs are dropped    release_stash_buffers                 release: drops all pools
    plain_experts:
    * experts run, plain    (TE)GroupedMLP, MLP .forward          run: open, upstream's forward, commit
    PagedStash:
    * their backward        autograd asks for what it saved       copies rows back, frees their pages
    end_of_step:
    * a step ends           finalize_model_grads; from 0.18 on    step_ends: an error if tensors were lost, unless
                            FullCudaGraphWrapper.__call__ too       a runner repeats the step
      a runner repeats it   PagedStashRunner.__call__             keeps the state of all random numbers
                              prepare_for_rerun                     forget_overflow; random numbers as before; no
                                                                    stash until the repetition is over

ExpertStash is a kind of `stashes`, which has one PagedStash for each set of sizes (`settings`). `checks` is for
shim.check(). paged_stash_init_chunk_handler, which announces the next chunk of the schedule, does nothing here.

Upstream: Megatron-LM #2690, #4247; the toggling on a rerun #6419.

Delete when: upstream's stash survives overflow and any order of microbatches, and the releases before that are gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function
from shim.patches.megatron_core.paged_stash.checks import MLP, STASHES
from shim.patches.megatron_core.paged_stash.checks import probe as probe
from shim.patches.megatron_core.paged_stash.checks import problems as problems
from shim.patches.megatron_core.paged_stash.checks import statistics as statistics
from shim.patches.megatron_core.paged_stash.end_of_step import (
    patch_finalize,
    patch_graph,
    patch_prepare_for_rerun,
    patch_runner,
)
from shim.patches.megatron_core.paged_stash.experts import ExpertStash
from shim.patches.megatron_core.paged_stash.plain_experts import patch_grouped, patch_mlp
from shim.patches.megatron_core.paged_stash.stand_ins import StandIns
from shim.patches.megatron_core.paged_stash.upstream_calls import (
    patch_fused_forward,
    patch_get_context,
    patch_group_commit,
    patch_group_start,
    patch_host_spill,
    patch_init_chunk_handler,
    patch_overflow,
    patch_release,
    patch_reset,
)

EXPERTS = "megatron.core.transformer.moe.experts:"
GROUPED = EXPERTS + "GroupedMLP.forward"
TE_GROUPED = EXPERTS + "TEGroupedMLP.forward"
STASH = "megatron.core.transformer.moe.paged_stash:"
FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
GRAPH = "megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__"

Factory = Callable[..., Function]  # of upstream's function and the stash

EVERYWHERE: dict[str, Factory] = {
    MLP: patch_mlp,
    TE_GROUPED: patch_grouped,
    FINALIZE: patch_finalize,
}
UPSTREAM: dict[str, Factory] = {
    EXPERTS + "TEGroupedMLP._fused_forward": patch_fused_forward,
    GRAPH: patch_graph,
    STASH + "paged_stash_group_start": patch_group_start,
    STASH + "get_paged_stash_context": patch_get_context,
    STASH + "paged_stash_group_commit": patch_group_commit,
    STASH + "paged_stash_init_chunk_handler": patch_init_chunk_handler,
    STASH + "paged_stash_reset": patch_reset,
    STASH + "check_paged_stash_overflow": patch_overflow,
    STASH + "check_paged_stash_host_spill": patch_host_spill,
    STASH + "PagedStashManager.release_stash_buffers": patch_release,
    STASH + "PagedStashRunner.__call__": patch_runner,
    STASH + "PagedStashRunner.prepare_for_rerun": patch_prepare_for_rerun,
}
VARIANTS: dict[str, dict[str, Factory]] = {
    "v0_12_1": {**EVERYWHERE, GROUPED: patch_grouped},
    "v0_17": EVERYWHERE,
    "v0_18": {**EVERYWHERE, **UPSTREAM},
}
WITHOUT_TRITON = StandIns("triton")


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    stash = ExpertStash(options)
    STASHES.add(stash)
    factories = {target: functools.partial(factory, stash=stash) for target, factory in VARIANTS[variant].items()}
    return Bindings(factories, Resource(stash.held, stash.release), WITHOUT_TRITON.resource())

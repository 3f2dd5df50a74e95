"""What the tests of the paged stash share: the toy experts of its proof, and a runner that repeats a step."""

from types import SimpleNamespace

import megatron.core.transformer.moe.paged_stash as paged_stash
import torch

from shim.patches.megatron_core.paged_stash.proof import (  # noqa: F401  for the tests
    CAPACITY_FACTOR,
    HIDDEN,
    ROWS,
    GroupedMLP,
    build,
    equal_bits,
    evaluate,
    forward,
    interpreted_kernels,
    settings,
    train,
    unwritten_memory_is_nan,
)


class Part(torch.nn.Module):
    """A module that has nothing but the given attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class OverBudgetOnce:
    """A token dispatcher that dropped tokens: PagedStashRunner runs the iteration again, and then it did not."""

    def __init__(self):
        self.config = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self._comm_manager = SimpleNamespace(moe_expert_rank_capacity_factor=CAPACITY_FACTOR)
        self.over_budget = torch.ones(1, dtype=torch.bool)

    def check_over_budget(self):
        return self.over_budget

    def reset_over_budget(self):
        self.over_budget.zero_()

    # From 0.20. HybridEP reports no capacity, and has no state to set up anew.

    def check_required_capacity(self):
        return None

    def invalidate_ep_bootstrap(self): ...


def run_twice(step, config, layer_config):
    """PagedStashRunner around `step` and a chunk with one MoE layer, which makes it run again; what `step` returned."""
    mlp = Part(config=layer_config, experts=Part(config=layer_config), token_dispatcher=OverBudgetOnce())
    decoder = Part(layers=torch.nn.ModuleList([Part(mlp=mlp)]))
    chunk = Part(decoder=decoder, config=config, mtp_process=False, zero_grad_buffer=lambda: None)
    tries = []
    runner = paged_stash.PagedStashRunner(config, False, [chunk], None, lambda **_: tries.append(step()))
    runner(model=[chunk], data_iterator=iter([None]), num_microbatches=1, seq_length=ROWS, forward_only=False)
    return tries

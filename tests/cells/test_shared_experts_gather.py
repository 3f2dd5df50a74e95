"""shared-experts-gather: with shared experts the all-gather dispatcher keeps its tokens, in training and without."""

from importlib import import_module

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.shared_experts_gather.proof import losses
from shim.testing import Layout

CELLS = {"0.13.1": "all"}

ID = "shared-experts-gather"
pytestmark = needed(ID)
OTHERS = [name for name in ("moe-without-te",) if shim.plan()[name].wanted]
TP = Layout(tp=2, sequence_parallel=True)
USERS = ("transformer.moe.token_dispatcher", "transformer.multi_latent_attention", "tensor_parallel.mappings")


def run(layout, trained, ids):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=ids):
        return losses(trained)


def off(ranks, layout, trained, ids):
    truth = run(Layout(), False, OTHERS)
    found = ranks.run(run, layout, trained, ids)[0]
    return float((found - truth[: len(found)]).abs().max())


@pytest.mark.parametrize("trained", [True, False])
def test_the_losses_are_those_of_one_rank(ranks2, trained):
    assert off(ranks2, TP, trained, [ID, *OTHERS]) < 1e-5


@pytest.mark.parametrize("trained", [True, False])
def test_beside_expert_parallelism(ranks4, trained):
    """Without gradients stock is silently wrong there."""
    layout = Layout(tp=2, ep=2, etp=2, sequence_parallel=True)
    assert off(ranks4, layout, trained, [ID, *OTHERS]) < 1e-5
    if not trained:
        assert off(ranks4, layout, False, OTHERS) > 1e-2


def test_multi_latent_attention_keeps_the_wrapper_of_its_patch():
    """Both wrap one function of megatron-core, each under the name of one module."""
    name, both = "gather_from_sequence_parallel_region", [ID, "mla-rope-key-gradient"]
    modules = [import_module(f"megatron.core.{module}") for module in USERS]
    with shim.patched(only=both):
        wrappers = [getattr(module, name) for module in modules]
    # By the second one attention sees that upstream sums the gradient of its rotary key.
    assert ["shared_experts_gather" in wrappers[0].__code__.co_filename,
            "mla_rope_key_gradient" in wrappers[1].__code__.co_filename] == [True, True]  # fmt: skip
    assert wrappers[0].__wrapped__ is wrappers[1].__wrapped__ is wrappers[2]


def test_without_shared_experts_the_buffer_is_used(ranks2):
    assert ranks2.run(buffers, 32)[0] == [False]
    assert ranks2.run(buffers, None)[0] == [True]


def buffers(shared):
    """Whether what the dispatcher returns is in the global memory buffer."""
    from megatron.core.parallel_state import get_global_memory_buffer
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher as Dispatcher

    from shim.patches.megatron_core.shared_experts_gather.proof import MODEL

    found = []
    with testing.megatron_on_cpu(), testing.layout_initialised(TP), shim.patched(only=[ID, *OTHERS]):
        model = testing.build_gpt(**{**MODEL, "moe_shared_expert_intermediate_size": shared}, sequence_parallel=True)
        dispatch = Dispatcher.token_dispatch

        def looked_at(self, *args, **kwargs):
            hidden, probs = dispatch(self, *args, **kwargs)
            held = get_global_memory_buffer().buffer.get(("mpu", hidden.dtype))
            found.append(held is not None and hidden.data_ptr() == held.data_ptr())
            return hidden, probs

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(Dispatcher, "token_dispatch", looked_at)
            row = torch.arange(8)[None]
            model(row, row, None)
    return found

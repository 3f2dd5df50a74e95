"""expert-bias-gradient: only biases of experts that are not cut lose their mark, and only where stock is wrong."""

import torch
from needed import needed
from uncompiled import inside

import shim
from shim import testing
from shim.patches.megatron_core.expert_bias_gradient.proof import of_experts, step, wrapped_model
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ID = "expert-bias-gradient"
pytestmark = needed(ID)
SPREAD = Layout(tp=2, sequence_parallel=True, ep=2, etp=1)


def gradients(layout, ids, frozen=False):
    """The gradients of this rank's experts after a step, and which of their parameters are marked."""
    with inside(layout), shim.patched(only=ids, require=ids):
        wrapped = wrapped_model()
        if frozen:
            for name, weight in wrapped.named_parameters():
                weight.requires_grad_(name.endswith("linear_fc2.bias") or "embedding" in name)
        step(wrapped)
        found = of_experts(wrapped)
        marks = sorted({name.split(".", 6)[-1] for name, weight in found.items() if _is_marked(weight)})
        return {name: weight.main_grad.clone() for name, weight in found.items() if weight.requires_grad}, marks


def _is_marked(weight):
    return getattr(weight, "sequence_parallel", False)


def test_nothing_changes_without_sequence_parallelism(ranks2):
    for (found, marks), (stock, _) in zip(
        ranks2.run(gradients, Layout(ep=2), [ID]), ranks2.run(gradients, Layout(ep=2), []), strict=True
    ):
        assert marks == []
        assert all(torch.equal(found[name], stock[name]) for name in stock)


def test_biases_alone_change_also_where_all_else_is_frozen(ranks2):
    """Every other gradient has stock's bits; frozen weights of experts change nothing about those of their biases."""
    runs = (ranks2.run(gradients, SPREAD, ids, frozen) for ids, frozen in (([ID], False), ([], False), ([ID], True)))
    for (found, marks), (stock, stock_marks), (frozen, _) in zip(*runs, strict=True):
        assert (len(stock_marks), marks) == (2, [])
        assert {name for name in stock if not torch.equal(found[name], stock[name])} == set(frozen)
        assert all(torch.allclose(frozen[name], found[name], rtol=1e-6, atol=1e-9) for name in frozen)


def marks_of_others(layout, allreduce):
    """Whether marks stay that a trainer has set on experts and on a dense weight."""
    with inside(layout), shim.patched(only=[ID], require=[ID]):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = testing.build_gpt(
            num_layers=1, mtp_num_layers=None, num_moe_experts=2, moe_token_dispatcher_type="allgather"
        )
        weights = [model.embedding.word_embeddings.weight, *model.decoder.layers[0].mlp.experts.parameters()]
        for weight in weights:
            weight.sequence_parallel = True
            if allreduce is None:
                vars(weight).pop("allreduce", None)
            else:
                weight.allreduce = allreduce
        DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        return all(weight.sequence_parallel for weight in weights)


def test_experts_that_are_cut_keep_their_marks(ranks2):
    assert ranks2.run(marks_of_others, Layout(etp=2), False) == [True, True]


def test_experts_that_all_ranks_have_keep_their_marks(ranks2):
    """Weights without `allreduce`, as upstream reads them."""
    assert ranks2.run(marks_of_others, Layout(tp=2, sequence_parallel=True, etp=1), None) == [True, True]


def wrapped_before():
    """What check says of a model that was wrapped on stock, and of one that was wrapped with the patch."""
    states = []
    with inside(SPREAD):
        early = wrapped_model()
        with shim.patched(only=[ID]):
            for model in (wrapped_model(), early):
                shim.check(model)
                states.append(shim.status()[ID].state)
    return states


def test_a_model_that_was_wrapped_before_is_known(ranks2):
    for late, early in ranks2.run(wrapped_before):
        assert early == "inactive"
        assert late != "inactive"

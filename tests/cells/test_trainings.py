"""Whole training steps that stock does right: the patches add no operation, no message and no byte to them."""

from dataclasses import asdict

import pytest
import torch.distributed as dist
from thorough import times
from trainings import TRAININGS, called, counted

import shim

CELLS = {"0.19.2": "all"}

# What these add or save, benchmarks/counts.py tells (docs/benchmarks.md).
PRICED = {"chunked-logprob", "mtp-packed-sequences"}
FREE = [id for id, decision in shim.plan().decisions.items() if decision.wanted and id not in PRICED]


def stock_and_patched(training):
    """The counts of this rank on stock, with the error's type where stock raises, and with the patches."""
    try:
        stock = counted(training)
    except Exception as error:  # what stock cannot do has no count
        stock = type(error).__name__
    with shim.patched(only=FREE, require=FREE):
        try:
            return stock, counted(training)
        except Exception as error:
            return stock, type(error).__name__


# test_device.py counts launches, copies and reads of such steps too.
EVERY_DAY = ["dense", "multi-token prediction", "experts, recompute", "TP 2, SP", "CP 2, packed", "PP 2"]


@pytest.mark.parametrize("name", times(EVERY_DAY, TRAININGS))
def test_the_patches_add_nothing(name, ranks):
    training = TRAININGS[name]
    for stock, patched in ranks[training.layout.world].run(stock_and_patched, training):
        if isinstance(stock, str):
            assert patched == stock or not isinstance(patched, str)
        else:
            theirs, ours = asdict(stock), asdict(patched)
            if training.layout.world > 1:
                del ours["peak_bytes"]  # messages under way hold memory for as long as they please
            assert {key: value for key, value in ours.items() if value > theirs[key]} == {}


def called_thrice(training):
    """Twice on stock, and once with a look at each loss."""
    from megatron.core.models.gpt import GPTModel

    def look(*args, **kwargs):
        return losses(*args, **kwargs)

    stock = [called(training), called(training)]
    losses = GPTModel.compute_language_model_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModel, "compute_language_model_loss", look)
        return *stock, called(training)


@pytest.mark.once
def test_a_python_call_more_is_counted(ranks):
    for once, again, more in ranks[1].run(called_thrice, TRAININGS["packed"]):
        assert once == again == more - 1


def with_one_message_more(training):
    """The counts of stock, and those of a norm of gradients that asks the other ranks once more."""
    from megatron.core.optimizer import clip_grads, optimizer

    def norm(*args, **kwargs):
        found = clip_grads.get_grad_norm_fp32(*args, **kwargs)
        dist.barrier()
        return found

    stock = counted(training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "get_grad_norm_fp32", norm)
        return stock, counted(training)


@pytest.mark.once
def test_a_message_more_is_counted(ranks):
    for stock, slower in ranks[2].run(with_one_message_more, TRAININGS["TP 2, SP"]):
        assert slower.messages == stock.messages + 1

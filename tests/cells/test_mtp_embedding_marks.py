"""mtp-embedding-marks: the copy of the embeddings for multi-token prediction is marked as the first stage's are."""

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.mtp_embedding_marks.proof import (
    EMBEDDING_LR,
    LR,
    gradient_of_embeddings,
    learning_rate_of_embeddings,
    wrapped_stage,
)
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "mtp-embedding-marks"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MARKS = ("zero_out_wgrad", "is_embedding_or_output_parameter")


def inside(layout, applied, function, args, options):
    """What the function returns in a layout of ranks, with the patch or on stock."""
    chosen = [ID, "mtp-recompute"] if applied else []
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        with shim.patched(only=chosen, require=chosen[:1]):
            return function(*args, **options)


def rates(ranks, **settings):
    return ranks.run(inside, Layout(pp=2), True, learning_rate_of_embeddings, (), settings)


def gradients(ranks, fused, layout=Layout(pp=2), applied=True, **options):
    return ranks.run(inside, layout, applied, gradient_of_embeddings, (fused,), options)


def marks_of_embeddings(**options):
    """Which marks this stage's embeddings have."""
    weight = wrapped_stage(**options).module.embedding.word_embeddings.weight
    return [bool(getattr(weight, mark, False)) for mark in MARKS]


def assert_equal(found, right):
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@TIED
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
def test_both_copies_have_the_gradient_of_one_stage(ranks2, options, tied):
    options = {"share_embeddings_and_output_weights": tied, **options}
    [right, _] = gradients(ranks2, False, Layout(), **options)
    for found in gradients(ranks2, True, **options):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@TIED
def test_without_fused_accumulation_it_is_stocks_to_the_bit(ranks2, tied):
    options = {"share_embeddings_and_output_weights": tied}
    assert_equal(gradients(ranks2, False, **options), gradients(ranks2, False, applied=False, **options))


def test_an_untied_copy_has_stocks_gradient_beside_a_fused_output_layer(ranks2):
    """Autograd has all of its gradient, so nothing has to be filled with zeros."""
    options = {"share_embeddings_and_output_weights": False}
    assert_equal(gradients(ranks2, True, **options), gradients(ranks2, True, applied=False, **options))


@TIED
def test_which_marks_a_copy_gets(ranks2, tied):
    options = {"share_embeddings_and_output_weights": tied}
    [_, last] = ranks2.run(inside, Layout(pp=2), True, marks_of_embeddings, (), options)
    assert last == [tied, True]


def test_the_copy_has_decoupled_lr(ranks2):
    assert rates(ranks2) == [EMBEDDING_LR, EMBEDDING_LR]


def test_without_decoupled_lr_both_have_the_common_one(ranks2):
    assert rates(ranks2, decoupled_lr=None, decoupled_min_lr=None) == [LR, LR]

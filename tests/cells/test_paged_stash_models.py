"""paged-stash where models have settings of their own: none of them knows anything of the others."""

import gc

import moe_cases as cases
import pytest
import torch
from moe_cases import HOST_ONLY, NOT_TOLD, build, stashing, statistics, train

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.12.3": "all"}

pytestmark = pytest.mark.skipif(NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        yield


@pytest.fixture
def applied():
    with cases.patched() as report:
        yield report


OTHER_SETTINGS = {"page_size": {"page_size": 8}, "factor": {"buffer_size_factor_cuda": -2.0}, "host": HOST_ONLY}


def test_an_overflow_is_told_although_another_model_runs_in_between():
    """Nothing of the first model lives by then, and its gradients are wrong."""
    first, second = build(), build()
    with cases.patched(overflow="raise"), cases.flags([second], page_size=8):
        with cases.flags([first], buffer_size_factor_cuda=0.2):
            train(first)
            cases.forward(first, 0).backward()
            cases.forward(second, 0)
            with pytest.raises(shim.ShimError, match="gradients since the last check are wrong"):
                cases.finish(first)


@pytest.mark.parametrize("values", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
@pytest.mark.parametrize("other", [{}, {"hidden_size": 64}, cases.BFLOAT16], ids=["alike", "wider", "bfloat16"])
def test_models_with_other_settings_are_trained_in_turns(applied, values, other):
    """With an evaluation in between. Each of them is stashed, and no bit changes."""
    first, second = build(), build(**other)
    plain = [[train(model, number) for number in range(3)] for model in (first, second)]
    with stashing(first), cases.flags([second], **values):
        counted = []
        for number in range(3):
            assert train(first, number) == plain[0][number]
            counted.append(statistics())
            with torch.no_grad():
                cases.forward(second, 1000)
            assert train(second, number) == plain[1][number]
            counted.append(statistics())
        taken = [now.stashed + now.spilled for now in counted[1:]]
        assert taken == sorted(set(taken)), "each step after the first ones stashes something"


def test_what_no_model_uses_any_more_is_given_up(applied):
    """Where its settings have changed, and where it is gone; what was counted stays."""
    first, second = build(), build()
    for config in cases.configs(second):  # which the context manager would keep
        config.moe_paged_stash, config.moe_paged_stash_page_size = True, 8
    with stashing(first):
        for model in (first, second, first, second):
            train(model)
        assert {pool.page_size for pool in statistics().pools} == {4, 8}
        before = statistics()
        with cases.flags([first], page_size=2):
            cases.forget(first), train(first)
        assert {pool.page_size for pool in statistics().pools} == {2, 8}
        assert statistics().stashed == before.stashed
        del second, model
        gc.collect()
        train(first), train(first)
        assert 8 not in {pool.page_size for pool in statistics().pools}
        assert statistics().stashed > before.stashed

"""masked-microbatch: a microbatch whose tokens are all masked adds nothing, and all others train as on stock."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

import shim
from shim import testing
from shim.patches.megatron_core.masked_microbatch.proof import TOKENS, error, microbatches, scheduled

CELLS = {"0.12.3": "all"}

ID, MTP = "masked-microbatch", "mtp-packed-sequences"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
pytestmark = pytest.mark.usefixtures("one_rank")


def patched(*ids):
    return shim.patched(only=[ID, *ids], require=[ID, *ids])


def patched_where_needed():
    return patched() if NEEDED else contextlib.nullcontext()


def divided(loss_func, per_token=False):
    """(loss, count, logged) of one of two microbatches, by the function that divides. The loss function gets 3.0."""
    model = testing.build_gpt(mtp_num_layers=None)
    model.config.calculate_per_token_loss = per_token
    output, logged = torch.tensor(3.0, requires_grad=True) * 1, []
    if hasattr(schedules, "forward_step_calc_loss"):
        found = schedules.forward_step_calc_loss(model, output, loss_func, model.config, None, False, 2, logged)
    else:
        found = schedules.forward_step(
            lambda data, model: (output, loss_func), None, model, 2, None, logged, model.config
        )
    return (*found, *logged)


def off_by(found, expected):
    return float((found - expected).norm() / expected.norm())


def parts_and_whole(model, **options):
    """Gradients of two microbatches together, and the sum of those with either of them masked."""
    both, *parts = (scheduled(model, microbatches(masked), **options)[0] for masked in ((0, 0), (0, 1), (1, 0)))
    return both, sum(parts)


@needed
def test_stock_gives_no_number():
    batches = microbatches([False, True])
    found, _ = scheduled(testing.build_gpt(mtp_num_layers=None), batches)
    assert found.isnan().all()


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
def test_gradients_are_the_sum_of_those_of_the_microbatches(options):
    """Both masked microbatches, the first and the last, leave what the other one adds."""
    with patched_where_needed():
        both, parts = parts_and_whole(testing.build_gpt(mtp_num_layers=None, **options))
    assert off_by(parts, both) <= 1e-6


def test_a_step_without_any_token_gives_zero():
    with patched_where_needed():
        found, logged = scheduled(testing.build_gpt(mtp_num_layers=None), microbatches([True, True]))
    assert not found.any()
    assert [one["loss"].item() for one in logged] == [0, 0]


@needed
@pytest.mark.parametrize("per_token", [False, True])
def test_where_every_microbatch_has_tokens_every_bit_stays(per_token):
    def run():
        model = testing.build_gpt(mtp_num_layers=None)
        model.config.calculate_per_token_loss = per_token
        return scheduled(model, microbatches([False, False]))

    expected, expected_log = run()
    with patched():
        found, log = run()
    assert torch.equal(found, expected)
    assert log == expected_log


@needed
@pytest.mark.parametrize("count", [torch.tensor(0), torch.tensor(0, dtype=torch.int), 0], ids=repr)
def test_the_count_stays_zero(count):
    """What the schedules add up, and what is logged. The loss is divided by one token and two microbatches."""
    with patched():
        loss, found, logged = divided(lambda output: (output, count, "logged"))
    assert (loss.item(), logged) == (1.5, "logged")
    assert found is count


@needed
@pytest.mark.parametrize("count", [torch.tensor(3), 3], ids=repr)
def test_any_other_count_divides_as_on_stock(count):
    expected = divided(lambda output: (output, count, "logged"))
    with patched():
        found = divided(lambda output: (output, count, "logged"))
    assert found[0].item() == expected[0].item() == 0.5
    assert found[1] is expected[1] is count


@needed
def test_nothing_is_counted_where_upstream_does_not_divide():
    """With calculate_per_token_loss, and with a loss function that returns two values."""
    with mock.patch.object(torch, "clamp", side_effect=AssertionError), patched():
        per_token = divided(lambda output: (output, torch.tensor(0), "logged"), per_token=True)
        two = divided(lambda output: (output, "logged"))
    assert (per_token[0].item(), per_token[1].item()) == (3, 0)
    assert (two[0].item(), two[1].item()) == (1.5, 0)


@needed
def test_outputs_that_are_no_loss_come_as_they_are():
    """Three values, of which the second is a zero, as collect_non_loss_data has them."""
    given = (torch.ones(2), torch.tensor(0), "data")
    model = testing.build_gpt(mtp_num_layers=None)

    def forward_step(data, chunk):
        return torch.ones(1), lambda output, non_loss_data=False: given

    with patched():
        (found,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    assert found is given


@needed
def test_an_exception_in_the_loss_function_leaves_nothing_behind():
    def raising(output):
        raise OSError("no loss")

    with patched():
        with pytest.raises(OSError, match="no loss"):
            divided(raising)
        assert error() <= 1e-6


@needed
def test_a_call_by_name():
    """Upstream's callers give some arguments by position; others may name all."""
    model, logged = testing.build_gpt(mtp_num_layers=None), []
    output = torch.tensor(3.0, requires_grad=True) * 1
    common = {"model": model, "num_microbatches": 2, "forward_data_store": logged, "config": model.config}

    def loss_func(output):
        return output, torch.tensor(0), "logged"

    with patched():
        if hasattr(schedules, "forward_step_calc_loss"):
            named = {"output_tensor": output, "loss_func": loss_func, "vp_stage": None, "collect_non_loss_data": False}
            loss, _ = schedules.forward_step_calc_loss(**common, **named)
        else:
            named = {"forward_step_func": lambda data, model: (output, loss_func), "data_iterator": None}
            loss, _ = schedules.forward_step(**common, **named, input_tensor=None)
    assert loss.item() == 1.5


@needed
def test_multi_token_prediction_takes_its_own_patch_beside():
    """Its loss has a division of its own."""
    with patched(MTP):
        both, parts = parts_and_whole(testing.build_gpt(mtp_num_layers=1), loss_mask=True)
    assert off_by(parts, both) <= 1e-6


def pipeline_on_rank():
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(pp=2)), patched_where_needed():
        both, parts = parts_and_whole(testing.build_gpt(mtp_num_layers=None))
        return off_by(parts, both)


def test_on_two_pipeline_stages(ranks2):
    """Only the last stage has a loss; the first one gets its gradient by message."""
    assert max(ranks2.run(pipeline_on_rank)) <= 1e-6

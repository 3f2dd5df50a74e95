"""loss-token-count: gradients and logged losses of context-parallel ranks are those of one; nothing else changes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

import shim
from shim import testing
from shim.patches.megatron_core.loss_token_count.proof import PROMPTS, TOKENS, off_by, step, wrapped_model
from shim.testing import Layout

CELLS = {"0.12.0": "all"}

ID, MASKED = "loss-token-count", "masked-microbatch"
BESIDE = [MASKED] if shim.plan()[MASKED].wanted else []
IS_CALC_LOSS = hasattr(schedules, "forward_step_calc_loss")
CP = Layout(cp=2)
UNTIED = {"share_embeddings_and_output_weights": False}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# One token counts of the first row, which leaves a rank none. None counts of the second one.
FEW = (TOKENS - 1, TOKENS)
PER_TOKEN = {"calculate_per_token_loss": True}
CASES = [(FULL, PROMPTS), ({}, FEW)]
if not testing.release().startswith("0.12."):  # which wants the count of all ranks there
    CASES.append(({"calculate_per_token_loss": True}, FEW))
on_one_rank = pytest.mark.usefixtures("one_rank")


def patched(on=True):
    return shim.patched(only=[ID, *BESIDE], require=[ID], options={ID: {"sum_over_cp": on}})


def trained(layout, cases, on=True):
    """The gradient of each weight by its name, and what is logged, of each case."""
    found = []
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), patched(on):
        for options, prompts in cases:
            wrapped = wrapped_model(**options)
            logged = step(wrapped, prompts)
            gradients = {name: weight.main_grad.clone() for name, weight in wrapped.module.named_parameters()}
            found.append((gradients, logged))
    return found


def whole(gradients, names):
    return torch.cat([gradients[name].double().flatten() for name in names])


def assert_those_of_one_rank(ranks, layout, cases):
    """Gradients, and the mean over context-parallel ranks of what is logged in the storage of the loss."""
    truths, ranks_found = trained(Layout(), cases), ranks.run(trained, layout, cases)
    for place, (truth, expected) in enumerate(truths):
        of_ranks = [found[place] for found in ranks_found]
        assert all(off_by(whole(found, truth), whole(truth, truth)) <= 5e-6 for found, _ in of_ranks)
        for row, microbatch in enumerate(expected):
            of_row = [logged[row] for _, logged in of_ranks]
            mean = torch.stack([one["loss"] for one in of_row]).mean()
            if not cases[place][0].get("calculate_per_token_loss"):
                torch.testing.assert_close(mean, microbatch["loss"])
            assert sum(one["count"] for one in of_row) == microbatch["count"]
            torch.testing.assert_close(sum(one["sum"] for one in of_row), microbatch["sum"])


def test_two_ranks_train_like_one(ranks2):
    """Under full recompute, and where a rank has no token that counts, or none of a row does."""
    assert_those_of_one_rank(ranks2, CP, CASES)


def of_four_ranks(layout):
    return trained(layout, [(UNTIED, PROMPTS)])[0][0]


@pytest.mark.once
def test_four_ranks_train_like_one(ranks4):
    """Two replicas, with a row each, and two pipeline stages, of which the last has a loss."""
    ((truth, _),) = trained(Layout(), [(UNTIED, PROMPTS)])
    for found in ranks4.run(of_four_ranks, CP):
        assert off_by(whole(found, truth), whole(truth, truth)) <= 5e-6
    for rank, found in enumerate(ranks4.run(of_four_ranks, Layout(cp=2, pp=2))):
        names = [name.replace("layers.0.", f"layers.{rank // 2}.") for name in found]  # a stage counts from zero
        assert off_by(whole(found, found), whole(truth, names)) <= 5e-6


def stock_and_off_on_rank():
    """The gradients without the patch and with its option off, and the sums over ranks on the way."""
    with testing.megatron_on_cpu(), testing.layout_initialised(CP):
        found, wrapped = [], wrapped_model()
        for ids in ([], [ID]):
            with (
                shim.patched(only=[*ids, *BESIDE]),
                mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
            ):
                step(wrapped)
            found.append((torch.cat([weight.main_grad.flatten() for weight in wrapped.parameters()]), sums.call_count))
        with shim.patched(only=[ID]):
            report = shim.check(wrapped)[ID]
            return found, report.state, report.reason


def test_nothing_happens_by_default_and_check_says_so(ranks2):
    for ((stock, sums), (off, sums_off)), state, reason in ranks2.run(stock_and_off_on_rank):
        assert torch.equal(off, stock) and sums_off == sums
        assert (state, reason) == ("inactive", "the option sum_over_cp is off")


def divided(loss_func, model=None, per_token=False, size=None):
    """(loss, count, logged) of one of two microbatches, by the function that divides. The loss function gets 3.0."""
    model = model or testing.build_gpt(mtp_num_layers=None)
    model.config.calculate_per_token_loss = per_token
    output, logged = torch.tensor(3.0, requires_grad=True) * 1, []
    if IS_CALC_LOSS:
        given = {} if size is None else {"cp_group_size": size, "is_last_stage": True}
        call = (model, output, loss_func, model.config, None, False, 2, logged)
        found = schedules.forward_step_calc_loss(*call, **given)
    else:
        found = schedules.forward_step(
            lambda data, model: (output, loss_func), None, model, 2, None, logged, model.config
        )
    return (*found, *logged)


def messages():
    return mock.patch.object(dist, "all_reduce", side_effect=AssertionError)


@on_one_rank
def test_one_rank_sends_no_message():
    count = torch.tensor(3)
    with patched(), messages():
        loss, found, logged = divided(lambda output: (output, count, "logged"))
        assert (loss.item(), logged) == (0.5, "logged") and found is count
        assert divided(lambda output: (output, count, "logged"), per_token=True)[0].item() == 3
        assert divided(lambda output: (output, "logged"))[0].item() == 1.5
    assert shim.status()[ID].state != "applied"


def of_two_ranks():
    """What the function that divides makes of counts of 1 and 4, of no count, and of a loss function that raises."""
    rank = dist.get_rank()
    with testing.megatron_on_cpu(), testing.layout_initialised(CP), patched():
        model = testing.build_gpt(mtp_num_layers=None)
        count = torch.tensor((1, 4)[rank], dtype=torch.int)
        kept = count.clone()
        loss, found, _ = divided(lambda output: (output, count, ""), model)
        own = found is count and torch.equal(count, kept)
        number, _, _ = divided(lambda output: (output, (1, 4)[rank], ""), model)
        with pytest.raises(OSError, match="no loss"):
            divided(mock.Mock(side_effect=OSError("no loss")), model)
        with messages():
            two = divided(lambda output: (output, ""), model)[0].item()
            per_token = divided(lambda output: (output, count, ""), model, per_token=True)
            if IS_CALC_LOSS:
                with pytest.raises(shim.ShimError, match=r"on 4 context-parallel ranks, and the model's group has 2"):
                    divided(lambda output: (output, count, ""), model, size=4)
        return loss.item(), own, float(number), two, (per_token[0].item(), per_token[1] is count)


def test_what_upstream_divides_by(ranks2):
    """3 * 2 / 5 tokens / 2 microbatches. The count that the schedules add up is the rank's own, as it came."""
    for found in ranks2.run(of_two_ranks):
        assert found == (pytest.approx(0.6), True, pytest.approx(0.6), 3.0, (3.0, True))


@on_one_rank
def test_outputs_that_are_no_loss_come_as_they_are():
    given = (torch.ones(2), torch.tensor(0), "data")
    model, logged = testing.build_gpt(mtp_num_layers=None), []
    loss_func = mock.Mock(return_value=given)
    with patched():
        if IS_CALC_LOSS:
            schedules.forward_step_calc_loss(model, torch.ones(1), loss_func, model.config, None, True, 1, logged)
        else:
            forward = lambda data, model: (torch.ones(1), loss_func)  # noqa: E731
            schedules.forward_step(forward, None, model, 1, None, logged, model.config, collect_non_loss_data=True)
    assert logged == [given]

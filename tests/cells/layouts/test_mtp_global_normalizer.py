"""Option global_normalizer of mtp-packed-sequences: MTP losses over the targets of all context-parallel ranks."""

from unittest import mock

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import (
    ACROSS_LAYOUTS,
    CP2,
    CP4,
    VERSION,
    WITHIN_LAYOUT,
    Messages,
    apply_in_rank,
    build,
    cp_group,
    in_layout,
    places_of,
    rank_of,
    row_of,
    unpacked,
    zeros_but,
)

from shim import testing
from shim.testing import Layout, oracle

GLOBAL = {"global_normalizer": True}


@pytest.fixture(scope="module", autouse=True)
def stock_again(ranks2, ranks4):
    """Other modules use the same ranks."""
    yield
    for ranks in (ranks2, ranks4):
        ranks.run(apply_in_rank, False, {})


def share(mask):
    """Targets of all context-parallel ranks, over the number of ranks."""
    total = mask.sum()
    dist.all_reduce(total, group=cp_group())
    return total / cp_group().size()


def global_factors(config, view, per_token_loss, depth):
    """As shim.testing.oracle, with the counts of all ranks."""
    weight = torch.tensor(config.mtp_loss_scaling_factor / depth)
    masks = [view.rolled_mask(k) if VERSION < (0, 17) else view.mask for k in range(1, depth + 1)]
    return [weight * share(mask) if per_token_loss else weight for mask in masks]


def global_truth(gpt, row, **options):
    """Each sequence alone, and the MTP loss such that its average over ranks is the mean over all targets."""
    with mock.patch.multiple(
        oracle,
        _mean=lambda loss, mask: (loss * mask).sum() / share(mask).clamp(min=1e-9),
        _mtp_factors=global_factors,
    ):
        return testing.run_alone(gpt, row, **options)


def global_in_rank(layout, cases):
    """Per case: whether all is finite, and the difference to the truth; of the first case also without the option."""
    with in_layout(layout, **GLOBAL):
        gpt, found = build(layout, mtp_num_layers=2), []
        for row, options in cases:
            result = testing.run_packed(gpt, row, **options)
            finite = result.logged.isfinite().all() and all(g.isfinite().all() for g in result.grads.values())
            found.append((bool(finite), testing.differences(result, global_truth(gpt, row, **options))))
            if len(found) == 1:
                unlike = testing.differences(result, testing.run_alone(gpt, row, **options))
        return found, unlike


def global_cases(align):
    few = [zeros_but(8, 6), torch.zeros(8)]  # on rank 0 of 2, after a roll on rank 1: fewer targets than ranks
    rows = [row_of((8, 8), align), row_of((8, 8), align, few), row_of((5, 13, 3), align)]
    rows.append(row_of((8, 8), align, [torch.zeros(8)] * 2))
    rows += [unpacked(16, mask) for mask in (None, zeros_but(16, 1, 9, 13))]
    return [(row, {"per_token_loss": per_token}) for row in rows for per_token in (False, True)]


@pytest.mark.parametrize("world", [2, 4])
def test_with_the_global_normaliser_the_average_over_ranks_is_the_mean_over_all_targets(ranks2, ranks4, world):
    """Logged losses and gradients of mean and per-token losses, where ranks have different numbers of targets,
    where one has none, fewer targets than ranks (from 0.17 upstream raises counts to 1), no target, and unpacked."""
    ranks, layout, cases = (ranks2, CP2, global_cases(4)) if world == 2 else (ranks4, CP4, global_cases(8)[:4])
    for rank, (found, unlike) in enumerate(ranks.run(global_in_rank, layout, cases)):
        for (row, options), (finite, difference) in zip(cases, found):
            assert finite and testing.worst(difference) <= WITHIN_LAYOUT, (rank, row.loss_mask, options, difference)
        assert unlike["grad"] > 1e-3, (rank, unlike)


def without_labels_in_rank(layout, per_token_loss):
    """0.19: (logged, gradients summed over ranks) of the MTP loss whose labels come from the input."""
    with in_layout(layout, **GLOBAL):
        gpt, row = build(layout, mtp_num_layers=2), row_of((5, 13, 3), 4)
        gpt.config.calculate_per_token_loss = per_token_loss
        places = places_of(row.ends, rank_of(cp_group()), layout.cp) if layout.cp > 1 else torch.arange(row.total)
        logits = gpt(
            input_ids=row.input_ids[:, places],
            position_ids=row.position_ids[:, places],
            attention_mask=None,
            loss_mask=row.loss_mask[:, places],
            packed_seq_params=row.packed_seq_params(),
        )
        (logits.sum() * 0).backward()
        grads = torch.cat([weight.grad.flatten() for weight in gpt.parameters() if weight.grad is not None])
        logged = mtp.MTPLossLoggingHelper.tracker["loss_values"].clone()
        mtp.MTPLossLoggingHelper.tracker.clear()
        if layout.cp > 1:
            dist.all_reduce(grads, group=cp_group())
        return logged, grads


@pytest.mark.skipif(VERSION < (0, 19), reason="labels are derived from the input from 0.19")
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_the_global_normaliser_knows_derived_labels(ranks2, per_token_loss):
    """They take one roll of the mask more; the mean over all targets is what one rank logs."""
    (logged, grads), _ = ranks2.run(without_labels_in_rank, Layout(), per_token_loss)
    (first, summed), (second, _) = ranks2.run(without_labels_in_rank, CP2, per_token_loss)
    torch.testing.assert_close((first + second) / 2, logged, rtol=ACROSS_LAYOUTS, atol=0)
    wrong = (summed if per_token_loss else summed / 2) - grads
    assert wrong.norm() / grads.norm() <= ACROSS_LAYOUTS


def steps_in_rank(layout, options):
    """Per row: (sums over ranks in a step, logged)."""
    with in_layout(layout, **options):
        gpt, found = build(layout, mtp_num_layers=2), []
        for row in (row_of((8, 8), 4), unpacked(16)):
            with Messages() as messages:
                logged = testing.run_packed(gpt, row).logged
            found.append((messages.reductions, logged))
        return found


def test_the_global_normaliser_costs_one_reduction_and_logs_what_one_rank_logs(ranks2):
    """One more sum over ranks in a step, for all MTP layers together, packed or not; and two sequences of 8 on two
    ranks, with 6 and 8 targets: the average of the ranks' own means is another number."""
    with_it, one, without = (
        ranks2.run(steps_in_rank, layout, options) for layout, options in ((CP2, GLOBAL), (Layout(), GLOBAL), (CP2, {}))
    )
    for row in range(2):
        assert all(a[row][0] == b[row][0] + 1 for a, b in zip(with_it, without))
        together, own = (torch.stack([rank[row][1] for rank in result]).mean(0) for result in (with_it, without))
        torch.testing.assert_close(together, one[0][row][1], rtol=ACROSS_LAYOUTS, atol=0)
        assert float((own - together).abs().max()) > 1e-3, (own, together)

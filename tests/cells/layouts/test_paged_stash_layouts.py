"""Patch paged-stash over ranks: spread experts, sharded experts, pipeline stages and their real schedules.

Functions named `..._in_rank` run in every rank of a pool at once; what they return is judged in the test.
"""

import moe_cases as cases
import pytest
from megatron.core import parallel_state
from moe_cases import DROPLESS, HOST_ONLY, MODEL
from thorough import in_full

from shim import testing
from shim.testing import Layout

CELLS = {"0.15.3": "all"}

pytestmark = pytest.mark.skipif(cases.NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")

STEPS, TOKENS = 3, 36
PADDED = {"moe_expert_capacity_factor": 1.5}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
# A model, and the stash's flags. Dropless alltoall gives gloo tensors where it takes lists of sizes.
DISPATCHED = {
    "alltoall, padded": (PADDED, {}),
    "allgather, padded": ({**PADDED, **ALLGATHER}, {}),
    "allgather, dropless": ({**DROPLESS, **ALLGATHER}, HOST_ONLY),
}


def step(stages, number, microbatches):
    """Of rows that every data-parallel rank has for itself, by the schedule that the release chooses."""
    first = 100 * number + 10 * parallel_state.get_data_parallel_rank()
    rows = [
        testing.pack(testing.random_sequences((TOKENS,), seed=first + microbatch)) for microbatch in range(microbatches)
    ]
    result = testing.run_schedule(stages, rows)
    return cases.Step([result.main], result.grads)


def steps_in_rank(layout, all_cases, model, microbatches=2, build=testing.build_gpt):
    """What became of saved tensors by the end of each step, for each case; None where a bit is not as without stash."""
    found = {}
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        options = {**MODEL, "sequence_parallel": layout.sequence_parallel, **model}
        for name, (of_case, _) in all_cases.items():
            stages = testing.build_chunks(build, **{**options, **of_case})
            found[name] = stages, [step(stages, number, microbatches) for number in range(STEPS)]
        with cases.patched():
            return {name: stashed(*found[name], microbatches, flags) for name, (_, flags) in all_cases.items()}


def stashed(stages, plain, microbatches, flags):
    counted = []
    with cases.stashing(*stages, **flags):
        for number, expected in enumerate(plain):
            if step(stages, number, microbatches) != expected:
                return None
            found = cases.statistics()
            counted.append((found.kept, found.stashed + found.spilled, sum(pool.wanted for pool in found.pools)))
    return counted


def assert_nothing_changed(results, with_experts=(True, True)):
    """On no rank. Where there are experts, originals are kept at first, and in every later step more is stashed."""
    for of_rank, has_experts in zip(results, with_experts, strict=True):
        for name, counted in of_rank.items():
            assert counted is not None, name
            (kept, first, _), (_, second, _), (_, third, _) = counted
            if has_experts:
                assert kept > 0 and first < second < third, (name, counted)
            else:
                assert kept == third == 0, (name, counted)
            assert all(wanted == 0 for _, _, wanted in counted), (name, counted)


def test_experts_over_two_ranks(ranks2):
    """Every buffer holds the tokens of both, half of it those of each."""
    assert_nothing_changed(ranks2.run(steps_in_rank, Layout(ep=2), DISPATCHED, {}))


@in_full
def test_experts_cut_by_tensor_parallelism(ranks2):
    """Under sequence parallelism, each rank's part of every expert sees the tokens of both."""
    assert_nothing_changed(ranks2.run(steps_in_rank, Layout(tp=2, sequence_parallel=True), DISPATCHED, {}))


# Pages for what one rank has in flight, and for a part of it.
ENOUGH = {"enough pages": (PADDED, {})}
TOO_FEW = {"too few pages": (PADDED, {"buffer_size_factor_cuda": 0.5})}


@in_full  # it is a part of the interleaved schedule
def test_1f1b(ranks2):
    """Backward of one microbatch runs between the forwards of others."""
    assert_nothing_changed(ranks2.run(steps_in_rank, Layout(pp=2), ENOUGH | TOO_FEW, {"num_layers": 2}, 4))


def test_interleaved_stages(ranks2):
    """Four stages on two ranks: forwards and backwards of both of a rank's stages take turns."""
    assert_nothing_changed(ranks2.run(steps_in_rank, Layout(pp=2, vp=2), TOO_FEW, {"num_layers": 4}, 4))


def first_stage_dense(**options):
    """As layer frequencies make it: the config speaks of experts, and none of the first stage's layers has any."""
    if not parallel_state.is_pipeline_first_stage():
        return testing.build_gpt(**options)
    kept = options.keys() - MODEL.keys() - PADDED.keys() | {"mtp_num_layers", "num_layers"}
    stage = testing.build_gpt(**{name: options[name] for name in kept})
    stage.config.num_moe_experts = options["num_moe_experts"]
    return stage


def test_a_stage_without_experts(ranks2):
    """It stashes nothing, and waits for nobody who does."""
    results = ranks2.run(steps_in_rank, Layout(pp=2), ENOUGH, {"num_layers": 2}, 4, first_stage_dense)
    assert_nothing_changed(results, with_experts=(False, True))

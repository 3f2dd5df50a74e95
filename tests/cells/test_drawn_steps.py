"""Whole training steps with random options, with shim: each is that of one rank and one sequence at a time in fp64.

    make fuzz SEEDS=0:300 RELEASE=0.16.1
    make fuzz SEEDS=17 RELEASE=0.16.1     # one that failed

A seed draws the options (tests/support/drawn_steps.py).
"""

import os
from dataclasses import replace

import drawn_steps
import drawn_towers
import pytest
import torch
import whole_steps
from thorough import times

from shim import testing

try:
    import tower_steps
except ImportError:  # 0.12 needs Transformer Engine for vision towers
    tower_steps = None

CELLS = {"0.19.2": "all"}
ABOUT = []

# Release -> seeds that failed once, and by what.
FAILED_ONCE = {
    "0.16.1": (4,),  # z-loss-padding waited for a count that packed-seq-aux-loss does itself
    "0.19.2": (357,),  # gloo refused what experts over tensor-parallel ranks send each other
}
# With these, every kind of model and of ranks, packed rows and rows alone, each kind of recompute, optimizer and frozen
# weights on some of them; from 28 on with multi-token prediction on packed rows.
EVERYDAY = (0, 2, 4, 5, 10, 11, *range(13, 23), 28, 32, 45, 51, 57, 80, 98)
IN_FULL = sorted({*range(24), *EVERYDAY})


def asked():
    """The seeds of SHIM_FUZZ_SEEDS, "3,10:20", or those of `make test`; all of the first under `make matrix`."""
    given = os.environ.get("SHIM_FUZZ_SEEDS")
    if not given:
        return sorted({*times(EVERYDAY, IN_FULL), *FAILED_ONCE.get(testing.release(), ())})
    seeds = []
    for part in given.split(","):
        first, _, last = part.partition(":")
        seeds += range(int(first), int(last)) if last else [int(first)]
    return seeds


def truth_and_found(steps, step, ranks, again):
    try:
        return steps.truth(step), ranks[step.world].run(steps.found, step)
    except Exception as error:
        raise AssertionError(f"{again}\n{type(error).__name__}: {error}") from error


def check(step, ranks, again):
    right, found = truth_and_found(whole_steps, step, ranks, again)
    together, each = whole_steps.BOUND[step.options["params_dtype"]]
    if step.kind == "delta":
        each = max(each, whole_steps.EACH_OF_DELTA)
    for shares in found:
        all_off, (error, name) = whole_steps.worst(shares, right)
        assert all_off < together and error < each, f"{again}\noff by {all_off:.1e}, {error:.1e} at {name}"
    assert right.keys() <= {name for shares in found for name, *_ in shares}, again


@pytest.mark.parametrize("seed", asked())
def test_a_step_is_that_of_one_rank_and_one_sequence(ranks, seed):
    step = drawn_steps.draw(seed)
    check(step, ranks, f"make fuzz SEEDS={seed} RELEASE={testing.release()}\nseed {seed}: {step}")


# A row with two sequences and padding, whose z-loss needs the tokens of both ranks.
PACKED = drawn_steps.Step(
    seed=4,
    kind="moe",
    layout=testing.Layout(cp=2),
    world=2,
    options={
        **drawn_steps.EXPERTS,
        "num_layers": 1,
        "calculate_per_token_loss": False,
        "sequence_parallel": False,
        "share_embeddings_and_output_weights": True,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.05,
        "moe_z_loss_coeff": 0.01,
    },
    rows=(((3,), (8,)),),
    packed=True,
    align=4,
    total=64,
    masked=True,
    prompts=True,
    frozen="",
    optimizer="",
)


@pytest.mark.skipif(drawn_steps.VERSION < (0, 16), reason="models of this release take no padding mask")
def test_a_packed_row_with_both_losses_of_a_router(ranks):
    """z-loss-padding gets the tokens of all ranks by the message of packed-seq-aux-loss."""
    check(PACKED, ranks, "")


# Experts of two ranks have adapters, and DDP sums the gradients of each bucket as soon as it has them.
WITHOUT_LOSSES = {name: value for name, value in PACKED.options.items() if not name.endswith("_coeff")}
ADAPTED = replace(
    PACKED,
    layout=testing.Layout(ep=2),
    options=WITHOUT_LOSSES | {"moe_router_load_balancing_type": "none"},
    rows=(((3, 8),), ((5,),)),
    masked=False,
    frozen="lora",
    ddp={"overlap_grad_reduce": True, "bucket_size": 2000},
)


def test_adapters_of_experts_on_two_ranks(ranks):
    check(ADAPTED, ranks, "")


def test_a_part_of_an_expert_gets_no_adapter(ranks):
    with pytest.raises(testing.ranks.RankError, match=r"linear_fc1 has a part of an expert"):
        ranks[2].run(whole_steps.found, replace(ADAPTED, layout=testing.Layout(tp=2, sequence_parallel=True)))


# A tower that is trained beside a language model that computes its layers anew. A row with two images, one, and none.
TOWER = drawn_towers.Step(
    seed=0,
    tower="clip",
    layout=testing.Layout(tp=2, sequence_parallel=True),
    world=2,
    language={
        "num_layers": 1,
        "calculate_per_token_loss": False,
        "sequence_parallel": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    vision={"num_layers": 1, "add_bias_linear": True},
    projection={"add_bias_linear": True},
    whole={
        "vision_projection_type": "mlp",
        "drop_vision_class_token": True,
        "pixel_shuffle": False,
        "share_embeddings_and_output_weights": True,
        "language_position_embedding_type": "rope",
    },
    grid=(2, 2),
    rows=((((11, ((0, 1), (5, 2))), (9, ((8, 1),)), (10, ())),),),
    prompts=True,
    frozen="",
)


def check_tower(step, ranks, again):
    (right, losses), found = truth_and_found(tower_steps, step, ranks, again)
    for logged, shares in found:
        off, (error, name) = whole_steps.worst(shares, right)
        assert off < 1e-6 and error < 1e-6, f"{again}\noff by {off:.1e}, {error:.1e} at {name}"
        for row, loss in logged:
            assert abs(loss / losses[row] - 1) < 1e-6, f"{again}\nloss {loss} of row {row}, right is {losses[row]}"
    assert losses.keys() == {row for logged, _ in found for row, _ in logged}, again
    assert right.keys() <= {name for _, shares in found for name, *_ in shares}, again


def towers():
    return [drawn_towers.draw(seed) for seed in asked()] if os.environ.get("SHIM_FUZZ_SEEDS") else [TOWER]


@pytest.mark.skipif(tower_steps is None, reason="vision towers of this release need Transformer Engine")
@pytest.mark.parametrize("step", towers(), ids=lambda step: step.seed)
def test_a_step_with_a_vision_tower_is_that_of_one_rank_and_one_sample(ranks, step):
    check_tower(step, ranks, f"make fuzz SEEDS={step.seed} RELEASE={testing.release()}\n{step}")

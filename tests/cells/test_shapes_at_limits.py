"""Shapes at the limits of what a model takes, with shim: a step is that of one rank and one sequence at a time in fp64.

Rows of one token, so that experts and ranks get none, microbatches of which nothing is trained, odd numbers of heads,
and fewer groups of queries than tensor-parallel ranks.
"""

import pytest
import torch
import whole_steps
from drawn_steps import DELTA, EXPERTS, LATER, MAMBA, MLA, VERSION, Step
from thorough import times

from shim.testing import Layout

CELLS = {"0.19.2": "all"}

MTP = {"mtp_num_layers": 2}
ONE_EXPERT = EXPERTS | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_token_dispatcher_type": "alltoall"}
GATHERED = ONE_EXPERT | {"moe_token_dispatcher_type": "allgather"}
SHARED = EXPERTS | {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 32}
ODD = {"num_attention_heads": 3, "num_query_groups": 1, "kv_channels": 8, "hidden_size": 40, "ffn_hidden_size": 36}
SPLIT = Layout(tp=2, sequence_parallel=True)

ONE_TOKEN = ((1,), (1,))
ONE_TOKEN_EACH = ((1, 1, 1), (1, 1))
# kind, options, layout, lengths of the sequences of each microbatch, microbatches of which nothing is trained
CASES = {
    "one token, experts of two ranks": ("moe", ONE_EXPERT, Layout(ep=2), ONE_TOKEN, ()),
    "one token each, gathered": ("moe", GATHERED, SPLIT, ONE_TOKEN_EACH, ()),
    "one token each, shared expert": ("moe", SHARED | {"mtp_num_layers": 1}, Layout(cp=2), ONE_TOKEN_EACH, ()),
    "one token, multi-token prediction": ("dense", MTP, SPLIT, ONE_TOKEN, ()),
    "one token, latent": ("mla moe", MLA | SHARED, Layout(pp=2), ONE_TOKEN, ()),
    "one token, gated delta net": ("delta", DELTA, SPLIT, ONE_TOKEN, ()),
    "one token, Mamba": ("mamba", MAMBA | {"mamba_num_groups": 2}, SPLIT, ONE_TOKEN_EACH, ()),
    "untrained, multi-token prediction": ("dense", MTP, Layout(cp=2), ((3, 4), (5, 1)), (0,)),
    "untrained, experts": ("moe", SHARED, Layout(ep=2), ((3, 4), (5, 1)), (1,)),
    "untrained, hybrid": ("hybrid moe", SHARED, Layout(pp=2), ((6,), (5,)), (0,)),
    "three heads": ("dense", ODD, Layout(cp=2), ((5, 1, 3), (7,)), ()),
    "one group": ("dense", MTP | {"num_query_groups": 1}, Layout(tp=2), ((5, 1, 3), (7,)), ()),
}
BASE = {
    "num_layers": 2,
    "share_embeddings_and_output_weights": False,
    "params_dtype": torch.float64,
    "pipeline_dtype": torch.float64,
}


# Every day each case has one of the two losses, by turns.
BOTH = [(case, per_token) for turn in (0, 1) for number, case in enumerate(CASES) for per_token in [number % 2 == turn]]


@pytest.mark.parametrize(("case", "per_token"), BOTH[: times(len(CASES), len(BOTH))])
def test_a_step_is_that_of_one_rank_and_one_sequence(ranks, case, per_token):
    kind, options, layout, lengths, untrained = CASES[case]
    if LATER.get(kind, VERSION) > VERSION:
        pytest.skip("this release has no such models, or they take no loss mask")
    if case == "one group" and VERSION < (0, 16):
        pytest.skip("this release wants a group for each rank, and says so")
    align = {(1, False): 1, (2, False): 4, (1, True): 2}[layout.cp, layout.sequence_parallel]
    options = BASE | options | {"calculate_per_token_loss": per_token, "sequence_parallel": layout.sequence_parallel}
    if kind in ("mamba", "hybrid moe"):
        options["num_layers"] = 4
    step = Step(
        seed=1,
        kind=kind,
        layout=layout,
        world=layout.world,
        options=options,
        rows=(lengths,) * layout.ep,
        packed=kind != "delta",
        align=align,
        total=max(sum(-(-length // align) * align for length in row) for row in lengths),
        masked=False,
        prompts=False,
        frozen="",
        optimizer="",
        untrained=untrained,
    )
    right = whole_steps.truth(step)
    each = whole_steps.EACH_OF_DELTA if kind == "delta" else 5e-6
    for shares in ranks[step.world].run(whole_steps.found, step):
        together, (error, name) = whole_steps.worst(shares, right)
        assert together < 5e-6 and error < each, f"off by {together:.1e}, {error:.1e} at {name}: {step}"

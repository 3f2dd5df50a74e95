"""shim.offload: two steps, sleep, wake and two steps are four steps, bit for bit, and nothing asked for stays."""

import subprocess
import sys
from pathlib import Path

import pytest
import sleep_cases
import torch
from sleep_cases import EXPERTS, Case
from thorough import in_full

from shim import testing
from shim.testing import Layout

ABOUT = []
CELLS = {"0.19.2": "all"}

REPOSITORY = Path(__file__).resolve().parents[2]
TABLES = 1024  # bytes of no model: tables of positions in the cache of a function

ONE = {
    "experts": Case("distributed", model=EXPERTS),
    "bf16": Case("plain"),
    "fp16": Case("distributed", half=torch.float16),
    "fp32": Case("plain", half=None),
    "distributed, MTP": Case("distributed", mtp=1),
    "distributed, fp32": Case("distributed", half=None),
    "SGD": Case("sgd"),
    "Muon": Case("muon"),
    "precision-aware": Case("aware"),
    "on the CPU": Case("offloaded"),
    "LoRA": Case("distributed", lora=True),
}
# Stages that share a weight move it to the device themselves, when they are built on the CPU.
UNTIED = {"share_embeddings_and_output_weights": False}
TWO = {
    "PP 2, VP 2": Case("distributed", layout=Layout(pp=2, vp=2), model={**UNTIED, "num_layers": 4}),
    "TP 2, SP": Case("plain", layout=Layout(tp=2, sequence_parallel=True)),
    "EP 2": Case("distributed", layout=Layout(ep=2), model=EXPERTS),
    "DP 2": Case("distributed", world=2),
}
FOUR = {
    "TP 2, DP 2": Case("distributed", layout=Layout(tp=2, sequence_parallel=True), world=4, mtp=1),
    "TP 2, PP 2": Case("distributed", layout=Layout(tp=2, pp=2), model=UNTIED),
    "EP 2, PP 2": Case("distributed", layout=Layout(ep=2, pp=2), model={**EXPERTS, **UNTIED}),
}


# What runs every day has each kind of optimizer, weights that are shared out, frozen ones, and experts.
EVERY_DAY = {"experts", "bf16", "precision-aware", "on the CPU", "LoRA", "PP 2, VP 2", "EP 2"}


def named(cases):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in EVERY_DAY else in_full) for n in cases])


@pytest.fixture(autouse=True)
def on_cpu():
    """In the place of the fixture that turns CUDA into the CPU."""


def check(found):
    before, asleep, after = found.bytes
    assert found.differ == []
    assert asleep <= TABLES and found.left == {}
    assert before == sum(found.freed.values()) + asleep
    assert after == before - found.dropped
    assert not any("exp_avg" in name or "master_param" in name for name in found.names)  # states have weights' names


def run(ranks, case, function=sleep_cases.slept):
    try:
        return ranks.run(function, case)
    except testing.RankError as error:
        if error.exception_type == "CannotRunError":
            pytest.skip(str(error))
        raise


@named(ONE)
def test_one_rank(ranks, name):
    for found in run(ranks[1], ONE[name]):
        check(found)


@named(TWO)
def test_two_ranks(ranks, name):
    for found in run(ranks[2], TWO[name]):
        check(found)


@named(FOUR)
def test_four_ranks(ranks, name):
    for found in run(ranks[4], FOUR[name]):
        check(found)


@pytest.mark.parametrize("optimizer", ["distributed", pytest.param("plain", marks=in_full)])
def test_what_needs_a_sleeping_model_is_refused(ranks, optimizer):
    assert run(ranks[1], Case(optimizer), sleep_cases.refused_asleep) == [[]]


@in_full
def test_the_benchmark_runs_on_a_pretended_device():
    """Of a GPU it takes the seconds; here it shows that each way gives the same weights."""
    program = [sys.executable, "benchmarks/sleep.py", "--measure", "--pretend"]
    told = subprocess.run(program, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert [line.split("  ")[0] for line in told.splitlines()[2:]] == [
        "the link",
        "shim.offload",
        "megatron-core's methods",
        "as verl does",
    ]

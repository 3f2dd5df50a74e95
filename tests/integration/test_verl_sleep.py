"""shim.offload beside verl's own functions that move a model and its optimizer to the host, see verl_sleep_story.py."""

import functools

import pytest
import trainers

RELEASES = ("0.13.1", "0.16.1", "0.19.2")
CASES = ("distributed", "LoRA", "precision-aware")
TABLES = 1024  # bytes of no model, as in tests/cells/test_sleep.py


@functools.cache
def story(core):
    return trainers.run("verl_sleep_story:tell", trainers=["verl"], core=core, te=None)


@pytest.mark.parametrize("core", RELEASES)
@pytest.mark.parametrize("case", CASES)
def test_each_alone_and_shim_behind_verl_give_the_same_bits(core, case):
    told = story(core)
    for order in ("verl", "shim", "verl, shim"):
        slept = told[f"{case}: {order}"]
        before, asleep, after = slept["bytes"]
        assert slept["differ"] == 0 and asleep <= TABLES and before == after, (order, slept)
    assert told[f"{case}: shim"]["left"] == told[f"{case}: verl, shim"]["left"] == {}
    assert told[f"{case}: verl"]["left"]["weights"] < 100  # buffers of modules


@pytest.mark.parametrize("core", RELEASES)
@pytest.mark.parametrize("case", CASES)
def test_verl_behind_shim_says_that_it_cannot(core, case):
    """It looks for its own copy of a buffer that is empty already."""
    assert story(core)[f"{case}: shim, verl"].startswith("AttributeError")  # of cpu_data or param_data_size


@pytest.mark.parametrize("core", RELEASES)
def test_verl_takes_no_plain_optimizer(core):
    told = story(core)
    assert told["plain: verl"] == "AttributeError: 'NoneType' object has no attribute 'storage'"
    assert told["plain: shim"]["differ"] == 0 and told["plain: shim"]["left"] == {}

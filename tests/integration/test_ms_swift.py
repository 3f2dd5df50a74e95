"""ms-swift under shim, applied before its package or by one of its plugins: its patches, rows and log-probabilities.

It builds mcore-bridge's models, of which test_mcore_bridge.py asks more. Datasets are a stand-in: nothing is read.
"""

from functools import cache

import pytest
from trainers import run, run_ranks

PAIRS = {"0.16.1": "2.12.0", "0.17.1": "2.14.1", "0.18.2": "2.16.1", "0.19.2": "2.20.2"}
ORDERS = ["package", "plugin"]
WITHIN = 1e-6  # relative, over all gradients
TRAINERS = ["mcore-bridge", "ms-swift"]

each_release = pytest.mark.parametrize("release", PAIRS)
each_order = pytest.mark.parametrize("order", ORDERS)


@cache
def story(release, order):
    return run("ms_swift_story:tell", order, trainers=TRAINERS, core=release, te=PAIRS[release])


@pytest.mark.parametrize("order", ["stock", *ORDERS])
@each_release
def test_its_own_rows_train_right(release, order):
    """Its offsets make each padding token a sequence of its own, which stock serves too: shim changes nothing."""
    packed = story(release, order)["packed"]
    assert len(packed) == 4
    for case, error in packed.items():
        assert error <= WITHIN, case


@each_order
@each_release
def test_its_log_probabilities_are_chunked_and_right(release, order):
    """It takes them from megatron-core's cross entropy, by the name in tensor_parallel: shim's, with either order."""
    told = story(release, order)
    assert told["log-probabilities are ours"]
    assert told["log-probabilities"] <= 1e-6


@each_order
@each_release
def test_its_patches_stay_where_they_are(release, order):
    """Those of pipelines, checkpoints and routers touch nothing of shim's, also after revert."""
    told = story(release, order)
    assert len(told["its own"]) == 6
    for name, module in told["its own"].items():
        assert module.startswith("swift.megatron."), name
    assert told["its own afterwards"] == told["its own"]


@each_order
@each_release
def test_nothing_is_in_conflict(release, order):
    """Before a model is built, that is; a required patch, or the wrappers of mcore-bridge, are no reason either.

    Without a model nobody can tell what some of mcore-bridge's own functions do.
    """
    status = story(release, order)["status"]
    found = {patch: state for patch, (state, *_) in status.items() if state != "idle"}
    untold = {patch for patch, state in found.items() if state == "unknown" and "mcore_bridge" in status[patch][1]}
    states = {state for patch, state in found.items() if patch not in untold}
    assert states <= {"applied", "upstream", "not-needed", "inactive", "excluded"}, found


@each_order
@each_release
def test_check_neither_raises_nor_warns(release, order):
    checked = story(release, order)["checked"]
    assert checked["raised"] is None and checked["said"] == []


@each_release
def test_both_places_have_one_digest(release):
    first, second = (story(release, order)["checked"]["digest"] for order in ORDERS)
    assert first == second


@each_release
def test_revert_by_a_plugin_leaves_every_object_as_it_was(release):
    assert story(release, "plugin")["left"] == []


@each_order
@each_release
def test_revert_leaves_nothing_of_shim(release, order):
    assert story(release, order)["ours"] == []


def test_ranks_with_different_places_agree():
    """One rank applies before the package, one by a plugin; check() compares them."""
    each = [(order,) for order in ORDERS]
    first, second = run_ranks("ms_swift_story:rank", each, trainers=TRAINERS, core="0.18.2", te=PAIRS["0.18.2"])
    assert first["digest"] == second["digest"]
    assert first["raised"] is None and second["raised"] is None


@pytest.mark.parametrize(("torchrun", "ranks"), [(False, ["-"]), (True, ["0", "1"])], ids=["alone", "torchrun"])
def test_its_launcher_carries_shim_run(torchrun, ranks):
    """`shim run -- megatron sft ...`: the processes that it starts have shim before they import anything."""
    told = run("ms_swift_story:launched", torchrun, trainers=TRAINERS, core="0.18.2", te=PAIRS["0.18.2"])
    assert told == [f"TOLD {rank} True applied --model m" for rank in ranks]

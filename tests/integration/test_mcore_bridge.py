"""mcore-bridge itself under shim, in both orders: its model classes train right, and check() says what is true of them.

Everything is mcore-bridge's, megatron-core's and Transformer Engine's own, except for the kernels: see te_on_cpu.py and
bridge_models.py. Each release and order is one process (mcore_bridge_story.py), of which the tests ask.
"""

from functools import cache

import pytest
from trainers import run, run_ranks

# Each with a release of Transformer Engine of its time. mcore-bridge 1.6.5 wants megatron-core 0.16 to 0.19.
PAIRS = {"0.16.1": "2.12.0", "0.17.1": "2.14.1", "0.18.2": "2.16.1", "0.19.2": "2.20.2"}
ORDERS = ["shim first", "trainer first"]
# Relative, over all gradients, within one layout.
WITHIN = 1e-6
ROPES = ("rope-thd", "rope-fusion")
WRAPPED = (*ROPES, "expert-bias-padding")

each_release = pytest.mark.parametrize("release", PAIRS)
each_order = pytest.mark.parametrize("order", ORDERS)


@cache
def story(release, order):
    return run("mcore_bridge_story:tell", order, trainers=["mcore-bridge"], core=release, te=PAIRS[release])


def state(checked, patch):
    return checked["states"][patch][0]


# ---- without shim


@each_release
def test_without_shim_padded_rows_train_wrong(release):
    """Plain rows are right, also in mcore-bridge's own layer; offsets with padding are not."""
    for case, error in story(release, "stock")["packed"].items():
        assert error > 1e-2 if case.endswith("padded") else error <= WITHIN, case


@each_release
def test_without_shim_a_moved_name_is_lost(release):
    """mcore-bridge gives it back to Transformer Engine, after megatron-core has looked for it."""
    assert story(release, "stock")["TE names"] == {"SplitAlongDim": False}


# ---- the models train right


@each_order
@each_release
def test_packed_equals_alone(release, order):
    """Rows with and without padding, one MTP layer or two, all weights or LoRA alone."""
    packed = story(release, order)["packed"]
    assert len(packed) == 8
    for case, error in packed.items():
        assert error <= WITHIN, case


@each_order
@each_release
@pytest.mark.parametrize("kind", ["experts", "latent attention", "mrope", "tied, detached"])
def test_packed_equals_alone_in_other_models(release, order, kind):
    """Padded rows, which without shim are wrong wherever there is an MTP layer; check() has nothing to say of it."""
    told, stock = (story(release, which)["kinds"][kind] for which in (order, "stock"))
    assert told["error"] <= WITHIN
    assert (stock["error"] > 1e-2) == (kind != "mrope")
    assert told["checked"]["said"] == [] and told["checked"]["raised"] is None


@each_order
@each_release
@pytest.mark.parametrize("adapted", ["whole", "LoRA"])
def test_recompute_equals_none(release, order, adapted):
    """To the bit. mcore-bridge has a recompute of its own: of all three layers, and under block of the first alone."""
    found = story(release, order)["recompute"][adapted]
    for method, again in (("uniform", 3), ("block", 1)):
        assert set(found[method]["same"].values()) == {0.0}, method
        assert found[method]["again"] == again, method
    assert "must be 1" in found["uniform by two"]["raised"]


@each_order
@each_release
def test_padding_is_not_counted_for_the_bias_of_experts(release, order):
    """mcore-bridge's router has an override of its own that is right, and above upstream's a wrapper that is."""
    with_padding, without = story(release, order)["counts"]
    assert with_padding == without


@each_order
@each_release
def test_a_moved_name_is_there(release, order):
    assert story(release, order)["TE names"] == {"SplitAlongDim": True}


# ---- check() says what is true


@each_order
@each_release
def test_what_is_wrapped_above_is_reached_and_applied(release, order):
    """Its three wrappers call what was there before. Either order has shim's below them."""
    told = story(release, order)
    assert told["reached"] == dict.fromkeys(WRAPPED, True)
    assert {patch: told["status"][patch][0] for patch in WRAPPED} == dict.fromkeys(WRAPPED, "applied")


@each_order
@each_release
@pytest.mark.parametrize("patch", WRAPPED)
def test_who_sits_above_is_named(release, order, patch):
    others = story(release, order)["status"][patch][2]
    assert any("mcore_bridge" in sentence and "patcher.py" in sentence for sentence in others), others


@each_order
@each_release
def test_packed_rows_train_right_and_check_does_not_deny_it(release, order):
    """Its MTP layer overrides methods that shim patches, without calling them, and rolls by shim's roll."""
    told = story(release, order)
    assert told["packed"]["1 MTP padded"] <= WITHIN
    assert state(told["checked"], "mtp-packed-sequences") in ("applied", "unknown")


@each_order
@each_release
def test_required_and_right_does_not_raise(release, order):
    assert story(release, order)["required"]["raised"] is None


@each_order
@each_release
@pytest.mark.parametrize("method", ["uniform", "block", "uniform by two"])
def test_what_check_says_of_mtp_recompute(release, order, method):
    """Under uniform by one its own recompute does what shim's does. Under block it keeps all activations of MTP layers,
    and chunks of two layers it refuses: there it hides the fix."""
    told = story(release, order)["recompute"]["whole"][method]
    right = told.get("again") == 3
    if right:
        assert state(told["checked"], "mtp-recompute") == "applied"
    else:
        assert state(told["checked"], "mtp-recompute") in ("shadowed", "unknown")
    assert right == (method == "uniform")


@each_order
@each_release
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_what_check_says_of_frozen_recompute(release, order, method):
    """The blocks are its own and do not reach the patch, but its model makes the embeddings require a gradient."""
    told = story(release, order)["recompute"]["LoRA"][method]
    assert set(told["same"].values()) == {0.0}
    assert state(told["checked"], "frozen-recompute") == "applied"


@each_order
@each_release
def test_check_warns_of_nothing_where_all_is_right(release, order):
    told = story(release, order)
    for model in ("checked", "checked again", "MoE", "required"):
        assert told[model]["said"] == [], model
        found = {state for state, _, _ in told[model]["states"].values()}
        assert found <= {"applied", "idle", "upstream", "not-needed", "inactive", "excluded"}, model


@each_order
@each_release
def test_check_warns_once_of_what_is_hidden(release, order):
    """Block recompute hides mtp-recompute on the first model and on the second."""
    told = story(release, order)["recompute"]
    [warning] = told["whole"]["block"]["checked"]["said"]
    assert "mtp-recompute" in warning and "mtp_layer.py:165" in warning
    assert told["LoRA"]["block"]["checked"]["said"] == []


@each_release
@pytest.mark.parametrize("place", ["roll in the layer", "roll in the loss"])
def test_an_override_that_hides_the_fix_is_found(release, place):
    """With the roll that mcore-bridge carries for older releases: padded rows train wrong, and check() says so."""
    told = story(release, "trainer first")["broken"][place]
    assert told["error"] > 1e-2
    assert state(told["checked"], "mtp-packed-sequences") == "shadowed"
    method = "_get_embeddings" if place == "roll in the layer" else "_postprocess"
    assert f"overrides {method}" in told["checked"]["states"]["mtp-packed-sequences"][1]


@each_release
def test_blocks_behind_embeddings_without_gradient_are_not_called_right(release):
    """Without what mcore-bridge does to its embeddings nothing is trained, and its blocks keep shim's fix away."""
    told = story(release, "trainer first")["broken"]["frozen embeddings"]
    assert told["trained"] is not True
    assert state(told["checked"], "frozen-recompute") in ("shadowed", "unknown")


@each_release
def test_both_orders_have_one_digest(release):
    first, second = (story(release, order)["checked"]["digest"] for order in ORDERS)
    assert first == second


# ---- revert


@each_release
def test_after_the_trainer_revert_leaves_every_object_as_it_was(release):
    """Every function and class of four packages, and what their closures hold."""
    assert story(release, "trainer first")["left"] == []


@each_order
@each_release
def test_revert_leaves_nothing_of_shim(release, order):
    told = story(release, order)
    assert told["ours"] == []


@each_order
@each_release
def test_reverted_equals_never_applied(release, order):
    assert story(release, order)["reverted"] == pytest.approx(story(release, "stock")["packed"], rel=1e-6)


# ---- ranks


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_ranks_with_different_orders_agree(release):
    """One rank applies before the trainer's import and one after it; check() compares them."""
    each = [(order,) for order in ORDERS]
    first, second = run_ranks(
        "mcore_bridge_story:rank", each, trainers=["mcore-bridge"], core=release, te=PAIRS[release]
    )
    assert first["digest"] == second["digest"]
    assert first["raised"] is None and second["raised"] is None
    assert {patch: told[0] for patch, told in first["states"].items()} == {
        patch: told[0] for patch, told in second["states"].items()
    }


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_context_parallel_ranks_share_a_padded_row(release):
    """Every token has the losses that it has on one rank, the main one and those of two MTP layers; also where the two
    ranks applied shim at different times. Without shim those of MTP are wrong."""

    def wrong(orders):
        each = [(order,) for order in orders]
        return run_ranks(
            "mcore_bridge_story:context_parallel", each, trainers=["mcore-bridge"], core=release, te=PAIRS[release]
        )

    for losses in wrong(ORDERS):
        assert max(losses) <= 5e-6
    for main, *mtp in wrong(["stock", "stock"]):
        assert main <= 5e-6 and min(mtp) > 1e-2

"""Real verl under shim, in both orders of patching: what trains right, what its backward frees, what check() says.

A process with verl tells a story once for each release and order, see verl_story.py.
"""

import functools

import pytest
import trainers

# megatron-core: the Transformer Engine beside it. 0.19.2 is newer than verl says it supports.
RELEASES = {"0.15.3": "2.9.0", "0.16.1": "2.12.0", "0.17.1": "2.14.1", "0.18.2": "2.16.1", "0.19.2": "2.20.2"}
ORDERS = ("shim first", "verl first")
PACKED, RECOMPUTE, OVERRIDE, FP8 = "mtp-packed-sequences", "mtp-recompute", "config-override", "fp8-fp4-recompute"


@functools.cache
def _ended(core, order):
    try:
        return trainers.run("verl_story:tell", order, trainers=["verl"], core=core, te=RELEASES[core])
    except trainers.StoryError as error:  # kept, so that it is not told again for each test
        return error


def story(core, order):
    told = _ended(core, order)
    if isinstance(told, Exception):
        raise told
    return told


@pytest.fixture(params=RELEASES)
def core(request):
    return request.param


@pytest.fixture(params=ORDERS)
def told(request, core):
    return story(core, request.param)


def wrong(errors, below=1e-6):
    """The cases that raised or are not `below`; NaN is not."""
    return {case: error for case, error in errors.items() if isinstance(error, str) or not error < below}


def newer(core, than):
    return tuple(map(int, core.split("."))) >= than


# Training


def test_packed_equals_alone(told):
    """Plain and padded rows, with full recompute and without, all weights, adapters, and verl's detached MTP."""
    assert not wrong(told["error"])
    assert len(told["error"]) == 18


def test_verls_own_rows_are_right(told):
    """Its collator, its loss and its forward; one row as long as its tokens, and one filled up to a multiple of 16."""
    assert not wrong(told["verl's rows"])


def test_recompute_changes_no_bit(told):
    assert told["same"] and all(same is True for same in told["same"].values()), told["same"]


def test_stock_is_wrong(core):
    """Without shim the same stories: what these tests see is really there."""
    told = story(core, "verl alone")
    errors = wrong(told["error"])
    assert {case for case in told["error"] if " padded " in case} <= errors.keys()
    if not newer(core, (0, 16)):
        assert all("packing is not yet supported" in errors[case] for case in told["error"])
    elif (0, 18) <= tuple(map(int, core.split("."))) < (0, 19):
        assert all("padding_mask" in str(errors[case]) for case in told["error"] if not case.endswith("none"))
    else:
        assert all(case.split()[1] == "padded" for case in errors)


# verl's backward frees the inputs of checkpoints, except those of MTP layers


def test_no_input_of_an_mtp_layer_is_freed(told, core):
    """verl finds the layer in the closure of what shim's checkpoint recomputes, and frees the decoder's inputs.

    Up to 0.17 verl binds a recompute of its own on the layers, whose closure holds no layer: verl alone frees their
    inputs too. There verl's own function takes it off again.
    """
    assert told["freed without it"] == {"mtp": 0, "decoder": 2}
    assert told["own recompute"] is not newer(core, (0, 18))
    if told["own recompute"]:
        assert told["freed"]["mtp"] == story(core, "verl alone")["freed"]["mtp"] if newer(core, (0, 16)) else True
    else:
        assert told["freed"] == {"mtp": 0, "decoder": 2}


def test_a_norm_that_saves_its_output_reads_what_it_saved(told):
    """MTP layers get that very output. Freed, it ends the process."""
    assert told["same without it"] == {"uniform": True, "block": True}


def test_verls_backward_recomputes_with_overrides_and_in_the_fp8_region(told):
    """What is carried lies in the checkpointed function, so who runs it again does not matter."""
    assert told["carried"] == {"override": ["overridden"] * 4, "region": [True, True]}


# What check() says


def states(told, which="checked"):
    assert told[which]["raised"] is None
    return told[which]["states"]


@pytest.mark.parametrize("which", ["checked", "checked without it"])
def test_check_names_verls_backward(told, core, which):
    """The patches that rely on upstream's backward say whose it is now; they are applied, because they still hold."""
    for id in (OVERRIDE, FP8):
        state, _, others = states(told, which)[id]
        (sentence,) = [text for text in others if "relies on" in text]
        assert state == "applied"
        assert "CheckpointFunction.backward" in sentence and "verl/models/mcore/patch.py" in sentence
    relying = {id for id, (_, _, others) in states(told, which).items() if "relies on" in " ".join(others)}
    assert relying == {OVERRIDE, FP8} | ({"router-replay"} if newer(core, (0, 16)) else set())


def test_nothing_else_is_amiss(told):
    """What verl binds on a model concerns the MTP patches and no other."""
    concerned = (PACKED, RECOMPUTE, "paged-stash")  # the model has no experts to stash
    others = {id: state for id, (state, _, _) in states(told).items() if id not in concerned and state != "idle"}
    assert set(others.values()) <= {"applied", "upstream", "not-needed", "inactive", "excluded"}, others


@pytest.mark.parametrize("order", ORDERS)
def test_check_says_what_verls_backward_costs(core, order):
    """It raises where no recomputed output requires a gradient. Ranks say the same, whatever came first."""
    state, _, others = states(story(core, order))["checkpoint-without-grad"]
    assert state == "applied"
    assert any("verl/models/mcore/patch.py" in text and "raises" in text for text in others)


def test_mtp_recompute_is_applied_where_verl_leaves_it(told, core):
    assert states(told, "checked without it")[RECOMPUTE][0] == "applied"
    if newer(core, (0, 18)):
        assert states(told)[RECOMPUTE][0] == "applied"


@pytest.mark.parametrize("which", ["checked", "checked without it"])
def test_check_says_that_packed_rows_are_right(told, which):
    """verl binds methods of its own on the model and the layers, which roll by the patched functions: none hides it."""
    state, reason, others = states(told, which)[PACKED]
    assert state == "applied", reason
    assert any("verl/models/mcore/mtp_patch.py" in text for text in others)


def test_check_says_that_a_recompute_whose_inputs_are_freed_is_no_fix(told, core):
    """It tries verl's recompute of a layer, and outlives that its inputs are freed meanwhile."""
    if newer(core, (0, 18)):
        assert told["freed"]["mtp"] == 0
        return
    state, reason, _ = states(told)[RECOMPUTE]
    assert told["freed"]["mtp"] > 0
    assert state == "shadowed" and "verl/models/mcore/mtp_patch.py" in reason


def test_both_orders_have_the_same_digest(core):
    first, second = (story(core, order)["checked"]["digest"] for order in ORDERS)
    assert first == second


def test_revert_leaves_nothing(told):
    """verl first: every function and class is the very object from before. shim first: none of shim's is left."""
    assert not told["left"]


def test_ranks_that_patch_in_different_orders_agree(core):
    """Tensor-parallel 2, gloo; check() compares the ranks."""
    each = [[order] for order in ORDERS]
    told = trainers.run_ranks("verl_story:tell_on_a_rank", each, trainers=["verl"], core=core, te=RELEASES[core])
    for rank in told:
        assert not wrong(rank["error"])
        assert rank["checked"]["raised"] is None


# verl's patches of whole classes


@pytest.mark.parametrize("order", ORDERS)
def test_patches_of_classes_compose(order):
    """GPTModel._postprocess (on NPUs) is the one that shim binds too: verl's calls shim's, whoever came first."""
    told = trainers.run("verl_story:tell_of_classes", order, trainers=["verl"], core="0.18.2", te=RELEASES["0.18.2"])
    assert told["error"] < 1e-6
    state, _, others = states(told)[PACKED]
    assert state == "applied"
    assert any("GPTModel._postprocess" in text and "verl/models/mcore/patch.py" in text for text in others)
    assert not told["left"]


# Where to call shim.apply()


@pytest.mark.parametrize("place", ["VERL_USE_EXTERNAL_MODULES", "plugin", "external_lib"])
def test_verl_imports_the_module_that_applies_shim(place):
    """The first two with verl itself, before megatron-core; external_lib with the model's config, after it."""
    variables = {place: "applies_shim"} if place.isupper() else {}
    told = trainers.run(
        "verl_story:tell_where", place, trainers=["verl"], core="0.18.2", te=RELEASES["0.18.2"], **variables
    )
    assert not told["megatron"] and told["applied"] is (place != "external_lib")
    assert told["error"] < 1e-6
    assert states(told)[PACKED][0] == states(told)[RECOMPUTE][0] == "applied"

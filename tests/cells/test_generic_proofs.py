"""The generic proofs of `shim prove --model`: what they say of models that are right, wrong, or cannot run.

Models of mcore-bridge and verl are in tests/integration/test_prove_model.py.
"""

import functools
import gc
import os
import queue

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from thorough import in_full

import shim
from shim import testing
from shim.testing import generic, sharded
from shim.testing.proof import CannotRunError, Here, measure
from shim.testing.user_model import Build, built

CELLS = {"0.13.1": "all"}

ABOUT = []  # the patches, see chosen.py

PLAN = shim.plan()
PACKED, RECOMPUTE, AGAIN = "packed-equals-alone", "recompute-equals-none", "packed-recompute-equals-none"
FROZEN = "trained-beside-frozen-weights"
REACHED, SHARDED, SAVED = "recompute-reaches-every-layer", "tensor-parallel-equals-one-rank", "save-and-load"
ONCE_EACH = "each-gradient-arrives-once"
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
build = functools.partial(testing.build_gpt, mtp_num_layers=1)
CANNOT_SAVE = PLAN["checkpoint-write-format"].wanted


def sides(build, *names):
    """What the proofs of these names say of the model; all of them without names."""
    proofs = [found for found in testing.generic_proofs(build) if not names or found.name in names]
    assert len(proofs) == (len(names) or 8)
    return {found.name: measure(found, Here(world=found.ranks)) for found in proofs}


def states(build, *names):
    found = sides(build, *names)
    assert not any(side.state == "broken" for side in found.values()), found
    return {name: side.state for name, side in found.items()}


def adapted(**overrides):
    model = build(**overrides)
    testing.add_lora(model)
    return model


def right(*names):
    return dict.fromkeys(names, "right")


def test_with_shim_everything_is_right():
    with shim.patched():
        found = states(build)
    assert found == right(PACKED, RECOMPUTE, AGAIN, REACHED, FROZEN, ONCE_EACH, SHARDED, SAVED)


@pytest.mark.skipif(not CANNOT_SAVE, reason="the release saves checkpoints")
@pytest.mark.parametrize("name", [SHARDED, SAVED])
def test_a_release_that_saves_nothing_is_named(name):
    text = sides(build, name)[name].text
    assert "megatron-core up to 0.12 saves no checkpoint with torch 2.7" in text
    assert "Apply checkpoint-write-format" in text and "use megatron-core 0.13" in text


def test_a_process_that_is_forked_for_a_save_leaves_this_one_s_garbage_alone():
    """A process group among it would crash it."""

    class Garbage:
        def __init__(self):
            self.itself, self.owner = self, os.getpid()

        def __del__(self):
            if os.getpid() != self.owner:
                os._exit(1)

    class Collected:
        """Where it arrives, the collector runs."""

        def __reduce__(self):
            return gc.collect, ()

    gc.disable()
    try:
        Garbage()
        with sharded._results_queue() as results:
            if isinstance(results, queue.Queue):
                pytest.skip("this release forks no process for a whole save")
            results.put(Collected())
            assert results.get() is not None
    finally:
        gc.enable()


@pytest.mark.skipif(PLAN["mtp-packed-sequences"].action != "apply", reason="the release packs rows right")
def test_on_stock_a_packed_row_is_wrong():
    with shim.patched(only=[]):
        assert states(build, PACKED) == {PACKED: "wrong"}


@pytest.mark.skipif(PLAN["frozen-recompute"].action != "apply", reason="the release trains adapters under recompute")
def test_on_stock_adapters_are_not_trained_under_recompute():
    with shim.patched(only=[]):
        assert states(adapted, RECOMPUTE, REACHED) == {RECOMPUTE: "wrong", REACHED: "wrong"}
    with shim.patched():
        assert states(adapted, PACKED, RECOMPUTE, AGAIN, REACHED) == right(PACKED, RECOMPUTE, AGAIN, REACHED)


def with_biases(**overrides):
    """With those of Qwen2's attention, and of all other linear layers. Nothing is frozen."""
    return build(add_qkv_bias=True, add_bias_linear=True, **overrides)


def adapted_with_biases(**overrides):
    """LoRA with bias="all" of peft."""
    model = with_biases(**overrides)
    testing.add_lora(model)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or name.endswith(".bias"))
    return model


@pytest.mark.parametrize("build", [with_biases, adapted_with_biases])
def test_on_stock_biases_beside_frozen_weights_are_not_trained(build):
    with shim.patched(only=[]):
        assert states(build, FROZEN) == {FROZEN: "wrong"}
    with shim.patched():
        assert states(build, FROZEN) == right(FROZEN)


def biased(**overrides):
    return build(add_bias_linear=True, **overrides)


@pytest.mark.skipif(PLAN["biased-mlp-recompute"].action != "apply", reason="the release returns no parameter")
def test_on_stock_a_recomputed_bias_is_no_leaf():
    """Of two layers, and of one of multi-token prediction where that recomputes its MLP."""
    with shim.patched(only=[]):
        side = sides(biased, ONCE_EACH)[ONCE_EACH]
    assert side.state == "wrong" and side.value in (2, 3), side
    with shim.patched():
        assert states(biased, ONCE_EACH) == right(ONCE_EACH)


# ---- what the proofs notice


def normed_by_torch(**overrides):
    """On a CPU torch's RMSNorm takes its input twice, and that of a depth of MTP has another use, in a loss."""
    return testing.build_gpt(mtp_num_layers=2, normalization="RMSNorm", **overrides)


def wide(**overrides):
    """Its weights are as large as those of a narrow model, so activations grow and much is rounded."""
    return testing.build_gpt(
        mtp_num_layers=1, num_layers=3, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4, **overrides
    )


@in_full
def test_what_a_wide_model_rounds_is_right():
    with shim.patched():
        found = sides(wide, PACKED, *(() if CANNOT_SAVE else (SHARDED,)))
    assert {side.state for side in found.values()} == {"right"}, found


def test_rounding_is_measured_if_more_is_found(monkeypatch):
    monkeypatch.setattr(generic, "EXACT", 1e-9)
    with shim.patched():
        side = sides(build, PACKED)[PACKED]
    assert side.state == "right" and "may be rounding here" in side.text


@pytest.mark.skipif(PLAN["mtp-packed-sequences"].action != "apply", reason="the release packs rows right")
def test_a_defect_of_a_wide_model_is_no_rounding():
    with shim.patched(only=[]):
        assert states(wide, PACKED) == {PACKED: "wrong"}


def test_gradients_that_are_added_up_in_another_order_are_right():
    """A recompute adds up those of the uses inside first."""
    with shim.patched():
        found = sides(normed_by_torch, RECOMPUTE, AGAIN)
    assert {name: side.state for name, side in found.items()} == right(RECOMPUTE, AGAIN)
    assert all(side.text == "bit-equal" or "may be rounding" in side.text for side in found.values())


def test_a_recompute_that_is_off_by_rounding_is_wrong(monkeypatch):
    """Less than what the order of a sum moves."""
    backward = CheckpointFunction.backward

    def off(ctx, *gradients):
        found = backward(ctx, *gradients)
        return tuple(value * (1 + 2e-7) if isinstance(value, torch.Tensor) else value for value in found)

    with shim.patched():
        monkeypatch.setattr(CheckpointFunction, "backward", staticmethod(off))
        found = sides(normed_by_torch, RECOMPUTE, AGAIN)
        monkeypatch.undo()
    assert {name: side.state for name, side in found.items()} == {RECOMPUTE: "wrong", AGAIN: "wrong"}
    assert all(float(side.text.rpartition(" ")[2]) < 1e-6 for side in found.values())


def attends_across_sequences(**overrides):
    """Attention that takes the row for one sequence."""
    model = build(**overrides)
    for core in [module for module in model.modules() if isinstance(module, testing.CPUCoreAttention)]:
        core._mask = lambda query, *rest: torch.ones(len(query), len(query), dtype=torch.bool).tril()
    return model


def other_in_the_recompute(**overrides):
    """A layer that gives another output where no graph is made, as in the forward pass of a checkpoint."""
    model = build(**overrides)
    last = model.decoder.layers[-1]
    last.mlp.register_forward_hook(
        lambda module, args, output: output if torch.is_grad_enabled() else (output[0] * 1.01, output[1])
    )
    return model


def other_on_the_second_rank(**overrides):
    model = build(**overrides)
    factor = 1 + parallel_state.get_tensor_model_parallel_rank() / 100
    model.decoder.final_layernorm.register_forward_hook(lambda module, args, output: output * factor)
    return model


def forgets_a_weight(**overrides):
    model = build(**overrides)
    complete = model.sharded_state_dict
    model.sharded_state_dict = lambda *args, **kwargs: {
        name: value for name, value in complete(*args, **kwargs).items() if not name.endswith("final_layernorm.weight")
    }
    return model


def forgets_it_in_silence(**overrides):
    model = forgets_a_weight(**overrides)
    model.load_state_dict = functools.partial(model.load_state_dict, strict=False)
    return model


def keeps_everything(**overrides):
    """A decoder that never recomputes, whatever its config says."""
    model = build(**overrides)
    forward = model.decoder.forward

    def without_recompute(*args, **kwargs):
        model.decoder.training = False  # of its layers each has its own
        try:
            return forward(*args, **kwargs)
        finally:
            model.decoder.training = True

    model.decoder.forward = without_recompute
    return model


def cuts_behind_a_frozen_weight(**overrides):
    model = adapted(**overrides)
    first = model.decoder.layers[0].mlp.linear_fc1
    first.register_forward_hook(
        lambda module, args, output: (output[0] if module.weight.requires_grad else output[0].detach(), output[1])
    )
    return model


def in_two_parts(**overrides):
    """A layer whose input norm runs in a checkpoint of its own, as well as outside."""
    model = build(**overrides)
    last = model.decoder.layers[-1]

    def twice(module, args, output):
        again = torch.utils.checkpoint.checkpoint(module.forward, args[0], use_reentrant=True)
        return (output + again) / 2

    last.input_layernorm.register_forward_hook(twice)
    return model


def thaws(**overrides):
    """A forward that makes a frozen weight require a gradient."""
    model = build(**overrides)
    weight = model.decoder.final_layernorm.weight.requires_grad_(False)
    model.decoder.register_forward_hook(lambda *_: (weight.requires_grad_(True), None)[1])
    return model


def leaves_one_out(**overrides):
    """A norm that is not trained under recompute."""
    model = build(**overrides)
    norm = model.decoder.final_layernorm
    if overrides.get("recompute_granularity") == "full":
        norm.register_forward_hook(lambda module, args, output: output.detach() + (args[0] - args[0].detach()))
    return model


@pytest.mark.parametrize(
    "build, name, text",
    [
        (cuts_behind_a_frozen_weight, FROZEN, "gradients off by"),
        (in_two_parts, ONCE_EACH, "2 parameters"),
        (thaws, ONCE_EACH, "1 parameters"),
        (leaves_one_out, ONCE_EACH, "2 parameters"),
        (attends_across_sequences, PACKED, "packed off by"),
        (other_in_the_recompute, RECOMPUTE, "recomputed off by"),
        (other_in_the_recompute, AGAIN, "recomputed off by"),
        (keeps_everything, REACHED, "2 layers not recomputed"),
        (other_on_the_second_rank, SHARDED, "TP off by"),
        (forgets_a_weight, SAVED, "ModelError: loading"),
        (forgets_it_in_silence, SAVED, "tensors differ"),
    ],
)
def test_a_proof_notices(build, name, text):
    with shim.patched():
        side = sides(build, name)[name]
    assert side.state == "wrong" and text in side.text, side


# ---- what a user's function may look like


def bare():
    """Takes no overrides: the sizes of the layout are read from parallel_state, and recompute is set afterwards."""
    return [build()]


def in_bfloat16(**overrides):
    return build(params_dtype=torch.bfloat16, bf16=True, **overrides)


def with_dropout(**overrides):
    return build(**{"hidden_dropout": 0.1, "attention_dropout": 0.1, **overrides})


def zero_adapters(**overrides):
    """LoRA as it starts: one factor is zero, so the other would get no gradient."""
    model = adapted(**overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".up"):
                weight.zero_()
    return model


@pytest.mark.parametrize(
    "build, names",
    [
        (bare, (RECOMPUTE, REACHED, SHARDED)),
        (in_bfloat16, (PACKED, SHARDED)),
        (with_dropout, (PACKED,)),
        (zero_adapters, (PACKED, FROZEN, SAVED)),
        (functools.partial(testing.build_gpt, mtp_num_layers=None), (PACKED, AGAIN, SHARDED)),
    ],
    ids=["bare", "bfloat16", "dropout", "adapters of zeros", "without MTP"],
)
def test_such_a_function_will_do(build, names):
    with shim.patched():
        assert states(build, *names) == right(*names)


# ---- what cannot run, and what is said of it


def with_megatrons_attention(**overrides):
    model = build(**overrides)
    for module in model.modules():
        if hasattr(module, "core_attention"):
            module.core_attention = DotProductAttention(
                model.config, 1, attn_mask_type=AttnMaskType.causal, attention_type="self"
            )
    return model


def deaf():
    return build(tensor_model_parallel_size=1)


def raises(**overrides):
    raise RuntimeError("No CUDA GPUs are available")


def no_language_model(**overrides):
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    "build, name, text",
    [
        (with_megatrons_attention, PACKED, "shim.testing.CPUCoreAttention"),
        (deaf, SHARDED, "pass them on to TransformerConfig"),
        (raises, SAVED, "build() raised RuntimeError: No CUDA GPUs.*CPUCoreAttention"),
        (no_language_model, RECOMPUTE, "without a LanguageModule"),
        (lambda **overrides: [build(), build()], RECOMPUTE, "returned 2 models"),
    ],
)
def test_what_cannot_run_is_said(build, name, text):
    with shim.patched(only=["checkpoint-write-format"]):
        side = sides(build, name)[name]
    assert side.state == "cannot run", side
    assert all(part in side.text for part in text.split(".*")), side.text


def test_megatrons_own_attention_will_do_for_the_others():
    with shim.patched():
        assert states(with_megatrons_attention, SHARDED, SAVED) == right(SHARDED, SAVED)


def test_weights_are_left_as_they_were_built():
    with testing.layout_initialised(testing.Layout()):
        model = built(Build.of(build), "cpu")
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        assert all(torch.equal(before[name], weight) for name, weight in build().named_parameters())


# ---- what shim says of the overrides


# Where the patch intervenes: in forward() up to 0.13, which shim cannot try, and then in what forward() checkpoints.
[TARGET, *_] = PLAN["mtp-recompute"].targets
METHOD = TARGET.rpartition(".")[2]


class CallsIt(MultiTokenPredictionLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

    def _checkpointed_forward(self, *args, **kwargs):
        return super()._checkpointed_forward(*args, **kwargs)


class Skips(MultiTokenPredictionLayer):
    def forward(self, input_ids, position_ids, hidden_states, *args, **kwargs):
        return self.final_layernorm(hidden_states), input_ids, position_ids

    def _checkpointed_forward(self, *args, **kwargs):
        function, args = (args[0], args[1:]) if args else (self._proj_and_transformer_layer, args)
        return function(*args, **kwargs)


@pytest.mark.parametrize("cls, state", [(CallsIt, "applied"), (Skips, "shadowed")])
@pytest.mark.parametrize("require", [[], ["mtp-recompute"]], ids=["asked", "required"])
def test_overrides_are_listed_with_what_shim_says(cls, state, require):
    """Also where check() raises, because what is required is not met."""
    with testing.layout_initialised(testing.Layout()), shim.patched(require=require):
        model = build(**UNIFORM)
        assert testing.overrides_of(model) == []
        model.mtp.layers[0].__class__ = cls
        [found] = [entry for entry in testing.overrides_of(model) if entry["patch"] == "mtp-recompute"]
        assert found["state"] == (state if METHOD == "_checkpointed_forward" or state == "applied" else "unknown")
        assert found["target"].endswith(f"MultiTokenPredictionLayer.{METHOD}")
        assert f"{__file__}:{getattr(cls, METHOD).__code__.co_firstlineno}" in found["reason"]


def test_without_shim_nothing_is_said_of_overrides():
    with testing.layout_initialised(testing.Layout()):
        model = build()
        model.mtp.layers[0].__class__ = Skips
        assert testing.overrides_of(model) == []


def test_an_error_that_says_why_on_a_rank_says_it_here():
    with pytest.raises(CannotRunError, match=r"^only here$"):
        Here(world=2).run(_cannot, layout=testing.Layout(tp=2))


def _cannot():
    raise CannotRunError("only here")

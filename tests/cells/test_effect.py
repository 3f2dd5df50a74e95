"""Overrides as trainers have them, on a real release: what check() says of each, and whether it trains right."""

import inspect
import types
import warnings

import megatron.core.models.gpt.gpt_model as gpt_model
import megatron.core.transformer.multi_token_prediction as mtp
import moe_cases
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.17.0": "all"}

ABOUT = ["mtp-packed-sequences", "mtp-recompute", "frozen-recompute"]  # the patches, see chosen.py

PACKED, RECOMPUTE, FROZEN = IDS = ["mtp-packed-sequences", "mtp-recompute", "frozen-recompute"]
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
EMBEDDINGS = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings"
Layer = mtp.MultiTokenPredictionLayer

from_014 = pytest.mark.skipif(VERSION < (0, 14), reason="up to 0.13 the block rolls and computes the loss")
from_016 = pytest.mark.skipif(VERSION < (0, 16), reason="up to 0.15 a layer does not get the packed row")


@pytest.fixture(autouse=True)
def applied(request):
    """On one rank, except where a test has ranks of its own."""
    if "ranks2" in request.fixturenames:
        yield
        return
    with testing.layout_initialised(Layout()), shim.patched(only=IDS, require=IDS):
        yield


def row():
    return testing.pack(testing.random_sequences((5, 7, 4)), align=4)


def trains_right(model):
    given = row()
    packed = testing.run_packed(model, given)
    return testing.worst(testing.differences(packed, testing.run_alone(model, given))) < 1e-6


def state_of(model, id):
    """What check() says under require. It raises where the patch is shadowed, and only there."""
    try:
        found = shim.check(model)[id]
    except shim.NotMetError as error:
        assert id in str(error)
        found = shim.status()[id]
        assert found.state == "shadowed"
    return found


def with_layer(cls, **options):
    model = testing.build_gpt(**options)
    model.mtp.layers[0].__class__ = cls
    return model


def with_class(cls, **options):
    model = testing.build_gpt(**options)
    model.__class__ = cls
    return model


def named(found, function):
    """Whether others, or the reason, name the file and line of an override."""
    where = f"{__file__}:{function.__code__.co_firstlineno}"
    return any(where in text for text in (found.reason, *found.others))


# Embeddings of an MTP layer


def result_of(layer, input_ids, position_ids, padding_mask, embedding, hidden_states):
    """The result of _get_embeddings, as the release has it."""
    inputs = embedding(input_ids=input_ids, position_ids=position_ids)
    hidden_states = hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_()
    if "padding_mask" in inspect.signature(Layer._get_embeddings).parameters:
        return input_ids, position_ids, padding_mask, inputs, hidden_states
    return input_ids, position_ids, inputs, hidden_states


def moved_in(tensor, starts, ends):
    """Each sequence of a row moved left by one, without a function of megatron-core or shim."""
    found = torch.zeros_like(tensor)
    for start, end in zip(starts, ends):
        found[..., start : end - 1] = tensor[..., start + 1 : end]
    return found


class ByName(Layer):
    """Its own order of things, with the roll of the module; as verl has it."""

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        known = {"packed_seq_params": packed_seq_params} if VERSION >= (0, 16) else {}
        ids, positions = (
            mtp.roll_tensor(t, -1, -1, cp_group=self.cp_group, **known)[0] for t in (input_ids, position_ids)
        )
        return result_of(self, ids, positions, padding_mask, embedding, hidden_states)


class OwnRoll(Layer):
    """Rolls by itself, between the padded offsets."""

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        offsets = [0, input_ids.size(-1)]
        if packed_seq_params is not None:
            offsets = packed_seq_params.cu_seqlens_q_padded.tolist()
        ids, positions = (moved_in(t, offsets[:-1], offsets[1:]) for t in (input_ids, position_ids))
        return result_of(self, ids, positions, padding_mask, embedding, hidden_states)


class WrongRoll(Layer):
    """Rolls by itself, between the offsets that do not know of padding."""

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        offsets = [0, input_ids.size(-1)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.tolist()
        ids, positions = (moved_in(t, offsets[:-1], offsets[1:]) for t in (input_ids, position_ids))
        return result_of(self, ids, positions, padding_mask, embedding, hidden_states)


class Unknown(OwnRoll):
    """Right, and not to be tried without the real embedding."""

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        assert embedding.word_embeddings.weight.size(0) > 0
        return OwnRoll.__dict__["_get_embeddings"](
            self, input_ids, position_ids, embedding, hidden_states, packed_seq_params, padding_mask
        )


@from_014
def test_an_override_that_names_the_patched_roll_trains_right(applied):
    model = with_layer(ByName)
    found = state_of(model, PACKED)
    assert found.state == "applied" and named(found, ByName._get_embeddings)
    assert trains_right(model)


@from_016
@pytest.mark.parametrize(
    ("cls", "state", "right"),
    [(OwnRoll, "applied", True), (WrongRoll, "shadowed", False), (Unknown, "unknown", True)],
)
def test_an_override_with_a_roll_of_its_own_is_judged_by_what_it_does(cls, state, right):
    """On the class, and bound to the instance."""
    bound = testing.build_gpt()
    bound.mtp.layers[0]._get_embeddings = types.MethodType(cls._get_embeddings, bound.mtp.layers[0])
    for model in (with_layer(cls), bound):
        found = state_of(model, PACKED)
        assert found.state == state and named(found, cls._get_embeddings), str(found)
        assert trains_right(model) == right
    assert ("word_embeddings" in found.reason) == (state == "unknown")


@from_016
def test_a_marked_override_is_believed(caplog):
    class Marked(Layer):
        _get_embeddings = shim.compatible(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
            version="0.1.0",
        )(lambda self, *args, **kwargs: Unknown._get_embeddings(self, *args, **kwargs))

    model = with_layer(Marked)
    found = state_of(model, PACKED)
    assert found.state == "applied" and "as of shim 0.1.0" in found.others[0]
    assert trains_right(model)
    assert not [record for record in caplog.records if record.name == "shim"]


def test_padding_that_the_router_takes_for_tokens_is_a_doubt():
    """From 0.18, with experts: right as long as nobody passes a padding mask."""
    if VERSION < (0, 18):
        pytest.skip("a layer gets no padding mask")

    class RollsMask(ByName):
        def _get_embeddings(self, *args, padding_mask=None, **kwargs):
            moved = None if padding_mask is None else padding_mask.roll(-1, -1)
            return ByName.__dict__["_get_embeddings"](self, *args, padding_mask=moved, **kwargs)

    balanced = {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux_loss"}
    for options in ({}, {**balanced, "moe_aux_loss_coeff": 0.0}):  # no experts, or none that count tokens
        model = with_layer(RollsMask, **options)
        assert state_of(model, PACKED).state == "applied" and trains_right(model)
    model = with_layer(RollsMask, **balanced, moe_aux_loss_coeff=0.1)
    found = state_of(model, PACKED)
    assert found.state == "unknown" and "padding mask" in found.reason


# The loss of a model


class OwnLoss(gpt_model.GPTModel):
    """Computes the loss of multi-token prediction itself, with the roll of the module; as mcore-bridge has it."""

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        states = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=None,
            packed_seq_params=kwargs.get("packed_seq_params"),
            rotary_pos_emb=args[0] if args else kwargs.get("rotary_pos_emb"),
            embedding=self.embedding,
        )
        main, deeper = states.chunk(2)
        weight = self.shared_embedding_or_output_weight()
        moved, mask = self.moved(labels, loss_mask, kwargs.get("packed_seq_params"))
        loss = self.compute_language_model_loss(moved, self.output_layer(deeper, weight=weight)[0]) * mask
        if self.training:
            mtp.MTPLossLoggingHelper.save_loss_to_tracker(loss.sum() / mask.sum(), 0, 1) if VERSION < (0, 19) else None
        scale = self.config.mtp_loss_scaling_factor
        loss = scale * loss if self.config.calculate_per_token_loss else scale * loss / mask.sum()
        main = mtp.MTPLossAutoScaler.apply(main, loss)
        return self.compute_language_model_loss(labels, self.output_layer(main, weight=weight)[0])

    def moved(self, labels, loss_mask, params):
        mask = torch.ones_like(labels) if loss_mask is None else loss_mask
        known = {"cp_group": self.cp_group, "packed_seq_params": params}
        return mtp.roll_tensor(labels, -1, -1, **known)[0], mtp.roll_tensor(mask, -1, -1, **known)[0]


class WrongLoss(OwnLoss):
    """Lets the last token of a sequence predict the first of the next."""

    def moved(self, labels, loss_mask, params):
        mask = torch.ones_like(labels) if loss_mask is None else loss_mask
        return labels.roll(-1, -1), mask.roll(-1, -1)


LOSS_CP = "mtp-loss-cp"


@from_016
@pytest.mark.parametrize(("ranks", "state"), [(1, "applied"), (2, "unknown")])
def test_an_own_loss_may_divide_by_a_ranks_own_count(ranks, state):
    """It calls nothing of what mtp-loss-cp fixes, which only matters on several context-parallel ranks."""
    with shim.patched(only=[LOSS_CP]) as report:
        if not report[LOSS_CP].targets:
            pytest.skip("this release needs no patch")
        model = with_class(OwnLoss)
        model.config.context_parallel_size = ranks
        assert shim.check(model)[LOSS_CP].state == state
        assert shim.check(with_class(gpt_model.GPTModel))[LOSS_CP].state == "applied"


@from_016
def test_an_own_loss_may_do_without_an_option_that_is_on():
    options = {"mtp-loss-options": {"skip_loss": True}}
    with shim.patched(only=["mtp-loss-options"], options=options):
        assert shim.check(with_class(OwnLoss))["mtp-loss-options"].state == "unknown"
        assert shim.check(with_class(gpt_model.GPTModel))["mtp-loss-options"].state == "applied"


def gradients_of(model, run):
    """The gradients of all weights. The oracle's other numbers are of losses that these models do not log."""
    return run(model, row()).grads


@from_016
@pytest.mark.parametrize(("cls", "state"), [(OwnLoss, "applied"), (WrongLoss, "shadowed")])
def test_an_override_of_the_loss_is_judged_by_its_targets(cls, state):
    model = with_class(cls)
    found = state_of(model, PACKED)
    assert found.state == state and named(found, OwnLoss._postprocess), str(found)
    packed, alone = (gradients_of(model, run) for run in (testing.run_packed, testing.run_alone))
    whole = torch.stack([grad.norm() for grad in alone.values()]).norm()
    apart = max(float((packed[name] - alone[name]).norm() / whole) for name in alone)
    assert (apart < 1e-6) == (state == "applied"), apart


# Recompute of an MTP layer


def function_in(layer, args):
    """Up to 0.17 upstream passes the recomputed function."""
    return (args[0], args[1:]) if args and callable(args[0]) else (layer._proj_and_transformer_layer, args)


class Recomputed(Layer):
    """Recomputes itself where the method is uniform, and skips where it is block; as mcore-bridge and verl have it."""

    def _checkpointed_forward(self, *args, **kwargs):
        function, args = function_in(self, args)
        kept = {
            k: v for k, v in kwargs.items() if not torch.is_tensor(v) and (k != "packed_seq_params" or v is not None)
        }
        names = [name for name, value in kwargs.items() if torch.is_tensor(value)]

        def run(*values):
            return function(*args, **kept, **dict(zip(names, values)))

        if self.config.recompute_method == "block":
            warnings.warn("skipped", stacklevel=1)
            return function(*args, **kwargs)
        return tensor_parallel.checkpoint(run, False, *(kwargs[name] for name in names))


class Skipped(Layer):
    def _checkpointed_forward(self, *args, **kwargs):
        function, args = function_in(self, args)
        return function(*args, **kwargs)


def calls_in(model):
    """How often the transformer layer inside the MTP layer runs in one step."""
    inner = getattr(model.mtp.layers[0], "mtp_model_layer", None) or model.mtp.layers[0].transformer_layer
    calls = []
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    testing.run_packed(model, row())
    return len(calls)


@from_014
@pytest.mark.parametrize(
    ("cls", "options", "state", "calls"),
    [
        (Recomputed, UNIFORM, "applied", 2),
        (Recomputed, BLOCK, "shadowed", 1),
        (Skipped, UNIFORM, "shadowed", 1),
        (Skipped, {}, "applied", 1),
    ],
    ids=["uniform", "block", "skipped", "off"],
)
def test_an_override_of_recompute_is_judged_by_whether_it_recomputes(cls, options, state, calls):
    """A row without recompute trains right too, but keeps what recompute was to free."""
    model = with_layer(cls, **options)
    found = state_of(model, RECOMPUTE)
    assert found.state == state and named(found, cls._checkpointed_forward), str(found)
    assert shim.status()[PACKED].state == "applied"
    assert calls_in(model) == calls and trains_right(model)


# Adapters behind frozen embeddings


class Block(TransformerBlock):
    """Recomputes by a method of its own; as mcore-bridge has it, also where upstream has none."""

    makes_differentiable = False

    def _checkpointed_forward(self, hidden_states, **rest):
        def run(states):
            for layer in self.layers:
                states = layer(hidden_states=states, **rest)[0]
            return states

        if self.makes_differentiable and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return tensor_parallel.checkpoint(run, False, hidden_states)

    def forward(self, hidden_states, attention_mask, **rest):
        rest = {name: rest[name] for name in ("rotary_pos_emb", "packed_seq_params") if name in rest}
        if self.config.recompute_granularity == "full" and self.training:
            states = self._checkpointed_forward(hidden_states, attention_mask=attention_mask, **rest)
        else:
            states = hidden_states
            for layer in self.layers:
                states = layer(hidden_states=states, attention_mask=attention_mask, **rest)[0]
        return states if self.final_layernorm is None else self.final_layernorm(states)


class RightBlock(Block):
    makes_differentiable = True


def adapted(cls, **options):
    model = testing.build_gpt(mtp_num_layers=None, **options)
    testing.add_lora(model)
    model.decoder.__class__ = cls
    return model


def gradients(model):
    return testing.run_packed(model, row()).grads


def test_a_block_that_trains_no_adapter_is_a_doubt_and_no_error():
    """Right with a hook on the embeddings, wrong without."""
    model = adapted(Block, **UNIFORM)
    found = state_of(model, FROZEN)
    assert found.state == "unknown" and "hook" in found.reason, str(found)
    assert named(found, Block.forward) or named(found, Block._checkpointed_forward)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients(model)
    model.embedding.register_forward_hook(lambda module, given, output: output.detach().requires_grad_())
    plain = gradients(adapted(Block))
    again = gradients(model)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_block_behind_embeddings_that_require_a_gradient_is_applied():
    """The model sees to it before the block runs; as mcore-bridge has it."""
    if VERSION < (0, 14):
        pytest.skip("models have no _preprocess")

    class Embeds(gpt_model.GPTModel):
        def _preprocess(self, *args, **kwargs):
            states, *rest = super()._preprocess(*args, **kwargs)
            return (states.detach().requires_grad_(), *rest)

    model = adapted(Block, **UNIFORM)
    model.__class__ = Embeds
    assert state_of(model, FROZEN).state == "applied"
    assert all(grad.any() for grad in gradients(model).values())


@pytest.mark.parametrize("cls", [RightBlock, Block], ids=["frozen", "whole"])
def test_a_block_that_needs_no_fix_is_applied(cls):
    """It makes the states require a gradient, or nothing is frozen."""
    model = adapted(RightBlock, **UNIFORM)
    if cls is Block:
        model = testing.build_gpt(mtp_num_layers=None, **UNIFORM)
        model.decoder.__class__ = Block
    found = state_of(model, FROZEN)
    assert found.state == "applied" and found.others, str(found)
    assert all(grad.any() for grad in gradients(model).values())


# Without a trace


@from_016
def test_trying_leaves_no_trace_and_takes_tiny_inputs():
    model = with_class(OwnLoss, **UNIFORM)
    layer = model.mtp.layers[0]
    layer.__class__ = type("Both", (Recomputed, OwnRoll), {})

    def traces():
        tensors = [*model.state_dict().values(), torch.get_rng_state()]
        keys = [sorted(vars(module)) for module in model.modules()]
        return [t.clone() for t in tensors if torch.is_tensor(t)], keys, [w.grad for w in model.parameters()]

    before = traces()
    with torch.no_grad(), testing.Footprint() as tried:
        found = shim.check(model)
    after = traces()
    assert len(found[PACKED].others) == 2 + (VERSION < (0, 19)) and found[RECOMPUTE].others
    assert all(map(torch.equal, before[0], after[0])) and before[1:] == after[1:]
    assert 0 < tried.peak_bytes < 1 << 20


# Ranks


def judged_on_a_rank(layout):
    """What check() says where one rank has overrides and the other has none, which would answer no message."""
    with testing.layout_initialised(layout), shim.patched(only=IDS, require=IDS):
        model = testing.build_gpt(**UNIFORM)
        if torch.distributed.get_rank() == 0:
            model.__class__ = OwnLoss
            model.mtp.layers[0].__class__ = type("Both", (Recomputed, OwnRoll), {})
        found = shim.check(model)
        return [found[id].state for id in IDS], bool(found[PACKED].others)


@from_016
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(cp=2)], ids=str)
def test_trying_sends_nothing_to_other_ranks(ranks2, layout):
    assert ranks2.run(judged_on_a_rank, layout) == [(["applied"] * 3, True), (["applied"] * 3, False)]


# Patches that an override concerns in some places only


@pytest.mark.skipif(moe_cases.NOT_TOLD, reason="experts of 0.12.0 are not told which rows are padding")
def test_shared_experts_have_nothing_to_stash_and_experts_have():
    """0.19 itself has shared experts with a forward of their own."""
    model = moe_cases.build(moe_shared_expert_intermediate_size=20)
    layer = model.decoder.layers[0].mlp

    def own(self, *args, **kwargs):
        return self.linear_fc2(self.linear_fc1(*args)[0])

    with moe_cases.patched(), moe_cases.stashing(model):
        layer.shared_experts.forward = types.MethodType(own, layer.shared_experts)
        found = shim.check(model)["paged-stash"]
        assert found.state == "applied" and named(found, own), str(found)
        expert = moe_cases.experts_of(model)[0]
        expert.forward = types.MethodType(own, expert)
        found = shim.check(model)["paged-stash"]
        assert found.state == "unknown", str(found)

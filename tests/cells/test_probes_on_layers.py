"""What probes say of overrides of an MTP layer: right ones, ones that lose one thing, ones that cannot be judged.

tests/cells/test_effect.py trains with the usual ones. Here each override differs from a right one in a single thing.
"""

import inspect
from types import SimpleNamespace

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from megatron.core import tensor_parallel
from probed import assert_said, moved, said

from shim import testing
from shim.patches.megatron_core import mtp_packed_sequences, mtp_recompute
from shim.testing import Layout

CELLS = {"0.16.1": "all", "0.19.2": ["test_padding_in_a_layer"]}

ABOUT = ["mtp-packed-sequences", "mtp-recompute"]  # the patches, see chosen.py

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
Layer = mtp.MultiTokenPredictionLayer
LAYER = f"{Layer.__module__}:MultiTokenPredictionLayer."

from_014 = pytest.mark.skipif(VERSION < (0, 14), reason="up to 0.13 the block rolls and computes the loss")
from_016 = pytest.mark.skipif(VERSION < (0, 16), reason="up to 0.15 a layer does not get the packed row")


@pytest.fixture(autouse=True)
def layout():
    with testing.layout_initialised(Layout()):
        yield


# Recompute of an MTP layer


class Recomputes(Layer):
    """Right, also for a row that is packed. Each of the classes below changes one of these."""

    times = 1

    def before(self, given):
        return given

    def inside(self, given):
        return given

    def _checkpointed_forward(self, *args, **kwargs):
        is_passed = bool(args) and callable(args[0])  # up to 0.17
        function = args[0] if is_passed else self._proj_and_transformer_layer
        given = self.before({"attention_mask": None, **kwargs})
        names = [name for name, value in given.items() if torch.is_tensor(value)]
        rest = {name: value for name, value in given.items() if name not in names}

        def once(*values):
            return function(**self.inside({**rest, **dict(zip(names, values, strict=True))}))

        for _ in range(self.times - 1):
            once(*(given[name] for name in names))
        if not self.times:
            return once(*(given[name] for name in names))
        return tensor_parallel.checkpoint(once, False, *(given[name] for name in names))


class Skips(Recomputes):
    times = 0


class RunsThrice(Recomputes):
    times = 2


class LosesDecoderInput(Recomputes):
    def before(self, given):
        return {**given, "decoder_input": given["decoder_input"].detach()}


class LosesStates(Recomputes):
    def before(self, given):
        return {**given, "hidden_states": given["hidden_states"].detach().requires_grad_()}


class DoublesGradientOfStates(Recomputes):
    def before(self, given):
        states = given["hidden_states"]
        return {**given, "hidden_states": 2 * states - states.detach()}


class DoublesGradientOfInputs(Recomputes):
    def before(self, given):
        inputs = given["decoder_input"]
        return {**given, "decoder_input": 2 * inputs - inputs.detach()}


class TrainsAnotherValue(Recomputes):
    def inside(self, given):
        return {**given, "hidden_states": given["hidden_states"] * (1 + given["hidden_states"].requires_grad)}


class FreesStates(Recomputes):
    """As a backward does that frees the inputs of a checkpoint."""

    def before(self, given):
        states = given["hidden_states"]
        states.register_hook(lambda grad: (states.untyped_storage().resize_(0), None)[1])
        return given


class MakesStatesDifferentiable(Recomputes):
    def before(self, given):
        states = given["hidden_states"]
        return given if states.requires_grad else {**given, "hidden_states": states.detach().requires_grad_()}


class LosesTheRow(Recomputes):
    def inside(self, given):
        return {**given, "packed_seq_params": None}


class LosesTheRowInRecompute(Recomputes):
    def inside(self, given):
        return {**given, "packed_seq_params": None} if given["hidden_states"].requires_grad else given


class AsksTheTrainer(Recomputes):
    def before(self, given):
        return self.of_this_trainer


def with_layer(cls, **options):
    model = testing.build_gpt(**{key: options[key] for key in options.keys() & {*UNIFORM, *NORMS}})
    layer = model.mtp.layers[0]
    layer.__class__ = cls
    for name, value in options.items():
        object.__setattr__(layer.config, name, value)
    return model, layer


@from_014
@pytest.mark.parametrize(
    ("cls", "options", "of_recompute", "of_rows"),
    [
        (Recomputes, UNIFORM, True, True),
        (Recomputes, BLOCK, True, True),
        (Recomputes, {**BLOCK, "recompute_num_layers": 0}, False, True),
        (Skips, UNIFORM, False, True),
        (Skips, BLOCK, False, True),
        (Skips, {**BLOCK, "recompute_num_layers": 0}, True, True),
        (RunsThrice, UNIFORM, False, True),
        (LosesDecoderInput, UNIFORM, False, False),
        (LosesStates, UNIFORM, False, False),
        (DoublesGradientOfStates, UNIFORM, False, False),
        (DoublesGradientOfInputs, UNIFORM, False, False),
        (TrainsAnotherValue, UNIFORM, False, False),
        (FreesStates, UNIFORM, False, True),
        (LosesTheRow, UNIFORM, True, False),
        (LosesTheRowInRecompute, UNIFORM, True, False),
        (AsksTheTrainer, UNIFORM, "of_this_trainer", "of_this_trainer"),
        (AsksTheTrainer, {}, True, True),
        (AsksTheTrainer, NORMS, True, True),
        (Recomputes, {**UNIFORM, "fp8": "hybrid"}, "cannot run FP8", "cannot run FP8"),
        (Recomputes, {**UNIFORM, "fp4": "e2m1"}, "cannot run FP8", "cannot run FP8"),
        (Skips, {"fp8": "hybrid"}, True, True),
    ],
)
def test_recompute_of_a_layer(cls, options, of_recompute, of_rows):
    model, layer = with_layer(cls, **options)
    assert_said(of_recompute, said(mtp_recompute, layer, LAYER + "_checkpointed_forward", [model]))
    assert_said(of_rows, said(mtp_packed_sequences, layer, LAYER + "_checkpointed_forward", [model]))
    model.config.mtp_num_layers = None
    assert said(mtp_packed_sequences, layer, LAYER + "_checkpointed_forward", [model]) is True


def frozen(*parts):
    """Changes a model so that these parts of it train nothing but their adapters, and the others nothing."""

    def change(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.partition(".")[0] in parts and name.endswith("layernorm.weight"))

    return change


def all_of(*parts):
    def change(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.partition(".")[0] in parts)

    return change


UNTOLD = "the layer is trained only if"


@from_014
@pytest.mark.parametrize(
    ("cls", "change", "expected"),
    [
        (Recomputes, frozen("mtp"), UNTOLD),
        (Recomputes, all_of("mtp"), UNTOLD),  # nothing of the layer is frozen, and nothing in front of it trains
        (MakesStatesDifferentiable, frozen("mtp"), True),
        (MakesStatesDifferentiable, all_of("mtp"), True),
        (Recomputes, frozen("mtp", "decoder"), True),
        (Recomputes, all_of("mtp", "embedding"), True),
        (Recomputes, all_of("decoder"), True),
        (Recomputes, all_of(), True),
        (Skips, frozen("mtp"), False),
    ],
)
def test_recompute_of_a_layer_behind_frozen_weights(cls, change, expected):
    """Up to 0.18 no input of the layer requires a gradient there."""
    model, layer = with_layer(cls, **UNIFORM)
    change(model)
    assert_said(expected, said(mtp_recompute, layer, LAYER + "_checkpointed_forward", [model]))


@from_014
@pytest.mark.parametrize(
    ("fp8", "fp4", "expected"),
    [(None, None, True), (None, "e2m1", "cannot run FP4"), ("hybrid", None, True), ("hybrid", "e2m1", True)],
)
def test_the_fp4_region_of_a_layer(fp8, fp4, expected):
    _, layer = with_layer(Recomputes, fp8=fp8, fp4=fp4)
    assert_said(expected, said(mtp_recompute, layer, LAYER + "_proj_and_transformer_layer"))
    assert_said("no way to try this method", said(mtp_recompute, layer, LAYER + "forward"))
    assert_said("no way to try this method", said(mtp_packed_sequences, layer, LAYER + "other"))


# Embeddings of an MTP layer


class Embeds(Layer):
    """Right. Each of the classes below changes one of these."""

    def ids(self, ids, row):
        return moved(ids, row)

    def embedded(self, ids, row):
        return moved(ids, row)

    def mask(self, mask, row):
        """As in shim: the last token of a sequence predicts nothing, and padding stays padding."""
        return mask | torch.isin(torch.arange(mask.size(-1)), torch.tensor([3, 7]))

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        inputs = embedding(input_ids=self.embedded(input_ids, packed_seq_params), position_ids=position_ids)
        mask = None if padding_mask is None else self.mask(padding_mask, packed_seq_params)
        between = (mask,) if "padding_mask" in inspect.signature(Layer._get_embeddings).parameters else ()
        return self.ids(input_ids, packed_seq_params), position_ids, *between, inputs, hidden_states


class ReturnsOthers(Embeds):
    def ids(self, ids, row):
        return ids.roll(-1, -1)


class EmbedsOthers(Embeds):
    def embedded(self, ids, row):
        return ids.roll(-1, -1) * (torch.arange(ids.size(-1)) != 2)  # one token of the first sequence is lost


class ReturnsUnmoved(Embeds):
    def ids(self, ids, row):
        return ids


class ReturnsOneThing(Embeds):
    def _get_embeddings(self, *args, **kwargs):
        return super()._get_embeddings(*args, **kwargs)[-2]


class EmbedsNothing(Embeds):
    def _get_embeddings(self, *args, embedding, **kwargs):
        return super()._get_embeddings(*args, embedding=lambda **_: None, **kwargs)


class KeepsTheMask(Embeds):
    def mask(self, mask, row):
        return mask


class RollsTheMask(Embeds):
    """The last token of a sequence counts as padding, and its padding as a token."""

    def mask(self, mask, row):
        return mask.roll(-1, -1)


class CountsNoPadding(Embeds):
    def mask(self, mask, row):
        return mask & False


class CountsNoTokens(Embeds):
    def mask(self, mask, row):
        return mask | True


class LosesTheMask(Embeds):
    def mask(self, mask, row):
        return None


@from_016
@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Embeds, True),
        (ReturnsOthers, True),  # what comes behind the last token of a sequence trains nothing
        (EmbedsOthers, False),
        (ReturnsUnmoved, False),
        (ReturnsOneThing, "something else than upstream"),
        (EmbedsNothing, "something else than upstream"),
    ],
)
def test_embeddings_of_a_layer(cls, expected):
    _, layer = with_layer(cls)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "_get_embeddings"))


BALANCED = {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ROUTED = {**BALANCED, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "moe_router_enable_expert_bias": False}
PADDING = "padding counts as tokens"


@pytest.mark.skipif(VERSION < (0, 18), reason="a layer gets no padding mask")
@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Embeds, BALANCED, True),
        (KeepsTheMask, BALANCED, True),
        (RollsTheMask, BALANCED, PADDING),
        (CountsNoPadding, BALANCED, PADDING),
        (CountsNoTokens, BALANCED, PADDING),
        (LosesTheMask, BALANCED, PADDING),
        (CountsNoPadding, {}, True),
        (CountsNoPadding, ROUTED, True),
        (CountsNoPadding, {**BALANCED, "moe_router_load_balancing_type": "none"}, True),
        (CountsNoPadding, {**ROUTED, "moe_z_loss_coeff": 0.1}, PADDING),
        (CountsNoPadding, {**ROUTED, "moe_router_enable_expert_bias": True}, PADDING),
    ],
)
def test_padding_in_a_layer(cls, options, expected):
    _, layer = with_layer(cls, **options)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "_get_embeddings"))


class Forwards(Layer):
    """Right: it has the row, and rolls by itself. Each of the classes below changes one of these."""

    def inputs(self, ids, row):
        return moved(ids, row)

    def row(self, row):
        return row

    def forward(self, input_ids, position_ids, hidden_states, packed_seq_params, embedding, **rest):
        inputs = embedding(input_ids=self.inputs(input_ids, packed_seq_params), position_ids=position_ids)
        given = {"decoder_input": inputs, "packed_seq_params": self.row(packed_seq_params)}
        return self._proj_and_transformer_layer(hidden_states=hidden_states, attention_mask=None, **given)


class ForwardsUnmoved(Forwards):
    def inputs(self, ids, row):
        return ids


class ForwardsNoRow(Forwards):
    def row(self, row):
        return None


class ForwardsACopy(Forwards):
    """Without padded offsets."""

    def row(self, row):
        return SimpleNamespace(cu_seqlens_q=row.cu_seqlens_q)


class ForwardsNothing(Forwards):
    def forward(self, hidden_states, **rest):
        return hidden_states


@from_014
@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Forwards, True),
        (ForwardsUnmoved, False),
        (ForwardsNoRow, False),
        (ForwardsACopy, False),
        (ForwardsNothing, "does not run the layer as upstream does"),
    ],
)
def test_forward_of_a_layer(cls, expected):
    _, layer = with_layer(cls)
    assert_said(expected, said(mtp_packed_sequences, layer, LAYER + "forward"))

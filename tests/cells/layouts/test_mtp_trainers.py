"""Patch mtp-packed-sequences under trainers that bring MTP code of their own, and the cases of upstream's tests.

mcore-bridge subclasses the layer and computes the loss itself, verl binds methods on instances and keeps aliases of
upstream's functions from before shim was applied. Both are written anew here, as small as shows what they rely on.

Upstream's own tests of MTP (Megatron-LM, tests/unit_tests/transformer/test_multi_token_prediction.py; they need CUDA,
most of them Transformer Engine), by name, with the releases whose tags have them and where their case is met here:

- constructor_local, constructor_ues_te (0.12 on; tag 0.14.0 has no such file): layers, numbers and shapes of a block.
  test_the_block_is_built_as_ever; Transformer Engine's layers are out of reach on CPU.
- sharded_state_dict (0.12 on): checkpoint keys of MTP weights. test_a_checkpoint_has_the_keys_it_always_had.
- forward_backward (0.12 on; with full recompute too): losses under TP and CP as on one rank, gradients everywhere.
  test_mtp_packed_sequences and test_mtp_context_parallel, with packed rows; its MoE layers with grouped GEMM are out of
  reach on CPU.
- fp8_support (0.12 on): needs FP8 hardware.
- save_loss_to_tracker (save_metrics_to_tracker in 0.19), track_mtp_metrics (0.12 on),
  track_mtp_loss_preserves_legacy_normalized_loss_semantics (0.19): what is logged is the sum of each step's mean.
  test_microbatches_add_up_in_the_log.
- packed_sequences (0.16 on): shapes, a logged loss per layer, gradients of a packed row.
  test_a_packed_row_gives_losses_and_gradients_everywhere.
- roll_tensor_with_packed_sequences (0.16 on): 1 2 3 | 4 5 rolls to 2 3 0 | 5 0, and over two ranks.
  test_rolls_as_upstream_says here, over ranks in test_mtp_context_parallel.
- packed_sequences_with_full_recompute (0.18 on; the stock 0.18 fails it): test_mtp_packed_sequences.
- get_embeddings_rolls_padding_mask, forward_propagates_rolled_padding_mask (0.18 on): the router's mask moves with the
  tokens. test_the_padding_mask_moves_with_the_tokens.
- sharded_state_dict_mamba, forward_backward_mamba, attention_mask_validation_mamba (0.17 on): hybrid models with Mamba
  layers, whose kernels need CUDA. Attention and MLP layers: test_mtp_pipeline_and_models.
- roll_tensor_none_input, roll_tensor_shifts_left_and_zeroes_last (0.19): test_rolls_as_upstream_says.
- process_mtp_loss_skips_when_no_labels_and_no_input_ids, process_mtp_loss_derives_labels_from_input_ids (0.19):
  tests of the same name.
- mtp_logits_are_vocab_sharded, constructor_with_detach_heads, mtp_detach_heads_config,
  get_embeddings_detaches_decoder_input, forward_detach_heads_gradient_flow,
  process_mtp_loss_detaches_output_weight (0.19): nothing the patch touches, except that detached heads have to train
  packed rows as well: test_packed_equals_alone_with_detached_heads.
"""

import itertools
import sys
import types
from functools import partial

import megatron.core.models.gpt.gpt_model as gpt_model
import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams

import shim
from shim import testing

CELLS = {"0.13.1": "first", "0.15.3": "all", "0.16.1": "first", "0.19.2": "first"}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

ID = "mtp-packed-sequences"
PATCHES = [ID, "mtp-recompute"]  # the sequences alone are recomputed as well, and they are not packed
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
WITHIN_LAYOUT = 1e-6
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS = [((5, 7, 4), 1), ((5, 7, 4), 4), ((1, 6, 2), 4)]
# What a trainer took before shim was applied: an alias, by the name it keeps.
TAKEN = {"roll_tensor": mtp.roll_tensor, "_process_mtp_loss": getattr(mtp, "process_mtp_loss", None)}

has_embeddings_step = pytest.mark.skipif(VERSION < (0, 14), reason="the layer has no _get_embeddings before 0.14")


@pytest.fixture
def applied():
    with shim.patched(only=PATCHES, require=PATCHES):
        yield


def row_of(lengths, align=1, **options):
    return testing.pack(testing.random_sequences(lengths), align=align, **options)


def worst_over(model, rows=ROWS, per_token=(False,), **options):
    found = (0.0, None)
    for (lengths, align), per_token_loss in itertools.product(rows, per_token):
        row = row_of(lengths, align)
        given = {name: make(row) for name, make in options.items()}
        packed, alone = (
            run(model, row, per_token_loss=per_token_loss, **given) for run in (testing.run_packed, testing.run_alone)
        )
        difference = testing.differences(packed, alone)
        value = testing.worst(difference)
        if not value <= found[0]:  # NaN is not smaller than anything
            found = (value, (lengths, align, per_token_loss, difference))
    return found


# ---- a subclass with a loss of its own


class BridgeLayer(mtp.MultiTokenPredictionLayer):
    """Rolls what it is given itself, embeddings of a vision model too, and calls upstream's checkpointing."""

    def _get_embeddings(self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, given=None):
        roll = partial(mtp.roll_tensor, shifts=-1, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
        input_ids, position_ids = roll(input_ids, dims=-1)[0], roll(position_ids, dims=-1)[0]
        if given is None:
            given = embedding(input_ids=input_ids, position_ids=position_ids)
        else:
            given = roll(given, dims=0)[0]
        return input_ids, position_ids, given, hidden_states

    def forward(
        self, input_ids, position_ids, hidden_states, attention_mask, embedding=None, packed_seq_params=None, **ignored
    ):
        given = getattr(self, "given", None)
        input_ids, position_ids, given, hidden_states = self._get_embeddings(
            input_ids, position_ids, embedding, hidden_states, packed_seq_params, given
        )
        rest = {"attention_mask": attention_mask, "rotary_pos_emb": ignored.get("rotary_pos_emb")}
        if self.config.recompute_granularity != "full" or not self.training:
            step = self._proj_and_transformer_layer
            hidden_states = step(hidden_states, given, packed_seq_params=packed_seq_params, **rest)
        elif VERSION < (0, 18):
            step = partial(self._proj_and_transformer_layer, packed_seq_params=packed_seq_params)
            hidden_states = super()._checkpointed_forward(
                step, hidden_states=hidden_states, decoder_input=given, **rest
            )
        else:
            hidden_states = super()._checkpointed_forward(
                hidden_states=hidden_states, decoder_input=given, packed_seq_params=packed_seq_params, **rest
            )
        return (hidden_states, input_ids, position_ids) + (() if VERSION < (0, 18) else (None,))


class BridgeModel(gpt_model.GPTModel):
    """Computes the MTP loss in a function that nobody else knows, by public helpers."""

    def _postprocess(self, *, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, **rest):
        row, mask = rest.get("packed_seq_params"), rest.get("loss_mask")
        hidden_states = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=rest.get("attention_mask"),
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=row,
            embedding=self.embedding,
        )
        return private_loss(self, hidden_states, labels, mask, row, mtp.roll_tensor)


def private_loss(model, hidden_states, labels, mask, row, roll_tensor):
    """Main loss [b, s], with the MTP losses attached; written against 0.16, the first to know packed rows."""
    depth, weight = model.config.mtp_num_layers, model.shared_embedding_or_output_weight()
    states, *predicted = torch.chunk(hidden_states, 1 + depth, dim=0)
    rolled_labels = labels
    for number, hidden in enumerate(predicted):
        group = getattr(model, "cp_group", None)
        rolled_labels, _ = roll_tensor(rolled_labels, -1, -1, group, row)
        mask, count = roll_tensor(mask, -1, -1, group, row)
        loss = mask * model.compute_language_model_loss(rolled_labels, model.output_layer(hidden, weight=weight)[0])
        mtp.MTPLossLoggingHelper.tracker.setdefault("values", torch.zeros(depth))[number] += loss.detach().sum() / count
        scale = model.config.mtp_loss_scaling_factor / depth
        states = mtp.MTPLossAutoScaler.apply(
            states, scale * loss / (1 if model.config.calculate_per_token_loss else count)
        )
    return model.compute_language_model_loss(labels, model.output_layer(states, weight=weight)[0])


def bridged(**options):
    model = testing.build_gpt(**options)
    model.__class__ = BridgeModel
    for layer in model.mtp.layers:
        layer.__class__ = BridgeLayer
    return model


@has_embeddings_step
@pytest.mark.parametrize("recompute", [{}, UNIFORM], ids=["", "recompute"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_subclass_with_its_own_loss_is_served(applied, one_rank, layers, recompute):
    """It overrides the layer's forward and embeddings and the model's loss; roll_tensor and the checkpointing it calls
    follow the row that it passes to them."""
    model = bridged(mtp_num_layers=layers, **recompute)
    value, case = worst_over(model)
    assert value <= WITHIN_LAYOUT, case


@has_embeddings_step
def test_a_subclass_rolls_given_embeddings(applied, one_rank):
    """roll_tensor(dims=0) moves embeddings [t, b, h] inside their sequences, and their gradients back."""
    row = row_of((5, 7, 4), 4)
    layer = bridged().mtp.layers[0]
    embeddings = torch.randn(row.total, 1, 32, requires_grad=True)
    *_, rolled, _ = layer._get_embeddings(
        row.input_ids, row.position_ids, None, None, row.packed_seq_params(), embeddings
    )
    expected = torch.zeros_like(embeddings)
    moved = torch.zeros(row.total, dtype=torch.bool)
    for start, length in row.spans:
        expected[start : start + length - 1] = embeddings[start + 1 : start + length].detach()
        moved[start + 1 : start + length] = True
    assert torch.equal(rolled, expected)
    rolled.sum().backward()
    assert torch.equal(embeddings.grad[:, 0, 0] == 1, moved) and not embeddings.grad[~moved].any()


@has_embeddings_step
@pytest.mark.skipif(VERSION >= (0, 16), reason="stock packs from 0.16")
def test_stock_cannot_serve_a_subclass(one_rank):
    """roll_tensor does not take the row: what the subclass needs is not there."""
    with pytest.raises(TypeError):
        testing.run_packed(bridged(), row_of((5, 7, 4)))


# ---- methods bound on instances, aliases from before


@pytest.fixture
def trainer():
    """A module of a trainer that was imported, aliases and all, before shim was applied."""
    module = types.ModuleType("a_trainer_with_aliases")
    module.__dict__.update({name: value for name, value in TAKEN.items() if value is not None})
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_aliases_from_before_are_served(trainer):
    """`from ... import process_mtp_loss as _process_mtp_loss`, and roll_tensor: rebound, and given back."""
    before = dict(vars(trainer))
    with shim.patched(only=[ID], require=[ID]):
        if VERSION < (0, 17):
            assert trainer.roll_tensor is mtp.roll_tensor is not before["roll_tensor"]
        else:
            assert trainer._process_mtp_loss is mtp.process_mtp_loss is not before["_process_mtp_loss"]
    assert all(vars(trainer)[name] is before[name] for name in TAKEN if name in before)


def _bound_postprocess(trainer):
    """verl's: the model's own step once more, by the trainer's aliases."""

    def _postprocess(self, *, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, **rest):
        row, mask = rest.get("packed_seq_params"), rest.get("loss_mask")
        hidden_states = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            attention_mask=rest.get("attention_mask"),
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=row,
            embedding=self.embedding,
        )
        if not hasattr(trainer, "_process_mtp_loss"):
            return private_loss(self, hidden_states, labels, mask, row, trainer.roll_tensor)
        weight = self.shared_embedding_or_output_weight()
        hidden_states = trainer._process_mtp_loss(
            hidden_states=hidden_states,
            labels=labels,
            loss_mask=mask,
            output_layer=self.output_layer,
            output_weight=weight,
            runtime_gather_output=None,
            is_training=self.training,
            compute_language_model_loss=self.compute_language_model_loss,
            config=self.config,
            cp_group=self.pg_collection.cp,
            packed_seq_params=row,
        )
        return self.compute_language_model_loss(labels, self.output_layer(hidden_states, weight=weight)[0])

    return _postprocess


def _bound_get_embeddings(trainer):
    """verl's: embeddings that MTP does not train."""

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None, padding_mask=None
    ):
        roll = partial(trainer.roll_tensor, shifts=-1, dims=-1, cp_group=self.cp_group)
        input_ids, _ = roll(input_ids, packed_seq_params=packed_seq_params)
        position_ids, _ = roll(position_ids, packed_seq_params=packed_seq_params)
        embedded = embedding(input_ids=input_ids, position_ids=position_ids).detach()
        masks = () if VERSION < (0, 18) else (padding_mask,)
        return (input_ids, position_ids, *masks, embedded, hidden_states)

    return _get_embeddings


def _bound_checkpointed_forward(self, forward_func=None, *args, **kwargs):
    """verl's: what is not a tensor stays out of the checkpoint's inputs."""
    function = forward_func or self._proj_and_transformer_layer
    saved = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    kept = {name: value for name, value in kwargs.items() if name not in saved}

    def run(*values):
        return function(*args, **dict(zip(saved, values, strict=True)), **kept)

    return tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, *saved.values())


def bound(trainer, **options):
    model = testing.build_gpt(**options)
    model._postprocess = _bound_postprocess(trainer).__get__(model)
    for layer in model.mtp.layers:
        layer._get_embeddings = _bound_get_embeddings(trainer).__get__(layer)
    return model


@has_embeddings_step
@pytest.mark.parametrize("layers", [1, 2])
def test_methods_bound_on_instances_are_served(trainer, one_rank, layers):
    """They run in place of patched methods; what they call by aliases from before is patched."""
    with shim.patched(only=[ID], require=[ID]):
        value, case = worst_over(bound(trainer, mtp_num_layers=layers))
        assert value <= WITHIN_LAYOUT, case


@has_embeddings_step
def test_checkpointing_bound_on_instances_is_served_and_named(applied, one_rank):
    """A recompute of its own finds the row: it is told of it from 0.16 on, and before, what it recomputes has the row.
    check() tries it wherever the patch has a checkpointing, finds it right, and names it."""
    model = testing.build_gpt(**UNIFORM)
    for layer in model.mtp.layers:
        layer._checkpointed_forward = _bound_checkpointed_forward.__get__(layer)
    found = shim.check(model)[ID]
    assert found.state == "applied", found.reason
    assert any("_checkpointed_forward" in text for text in found.others) == (VERSION < (0, 19))
    value, case = worst_over(model)
    assert value <= WITHIN_LAYOUT, case


# ---- the cases of upstream's own tests


def params(valid, padded=None):
    lengths = {"cu_seqlens_q": torch.tensor(valid, dtype=torch.int32)}
    if padded:
        lengths["cu_seqlens_q_padded"] = torch.tensor(padded, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", **lengths)


def test_the_block_is_built_as_ever(applied, one_rank):
    """The patch adds no module and no weight: as many layers as asked for, numbered from 1, in the same shapes."""
    block = testing.build_gpt(mtp_num_layers=2).mtp
    assert [layer.layer_number for layer in block.layers] == [1, 2]
    for layer in block.layers:
        assert layer.enorm.weight.shape == layer.hnorm.weight.shape == (32,)
        assert layer.eh_proj.weight.shape == (32, 64)


def test_a_checkpoint_has_the_keys_it_always_had(one_rank):
    """The sharded state dict, too, is the same with and without the patch."""
    stock = testing.build_gpt(mtp_num_layers=2).sharded_state_dict()
    with shim.patched(only=[ID], require=[ID]):
        keys = testing.build_gpt(mtp_num_layers=2).sharded_state_dict()
    assert keys.keys() == stock.keys()
    assert {f"mtp.layers.{i}.{name}.weight" for i in (0, 1) for name in ("enorm", "hnorm", "eh_proj")} <= keys.keys()


def test_a_packed_row_gives_losses_and_gradients_everywhere(applied, one_rank):
    """Three sequences of 16, 24 and 12 tokens: a loss for every token and layer, a gradient for every weight."""
    row = row_of((16, 24, 12))
    model = testing.build_gpt(mtp_num_layers=2)
    result = testing.run_packed(model, row)
    assert result.main.shape == (52,) and result.logged.shape == (2,) and (result.logged > 0).all()
    assert result.grads.keys() == {name for name, _ in model.named_parameters()}
    assert all(gradient.any() for gradient in result.grads.values())


def test_microbatches_add_up_in_the_log(applied, one_rank):
    """The tracker holds the sum of the rows' means, whatever their lengths: no weighting by tokens."""
    rows = [row_of((5, 7, 4), 4), row_of((3,))]
    model = testing.build_gpt(mtp_num_layers=2)
    each = [testing.run_packed(model, row).logged for row in rows]
    torch.testing.assert_close(testing.run_schedule(model, rows).logged, sum(each))


def test_rolls_as_upstream_says(applied):
    if VERSION not in ((0, 17), (0, 18)):  # there the patch leaves this function alone, and nobody calls it so
        assert mtp.roll_tensor(None, shifts=-1, dims=-1) == (None, None)
    batch = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert mtp.roll_tensor(batch, shifts=-1, dims=-1)[0].tolist() == [[2, 3, 0], [5, 6, 0]]
    rolled, total = mtp.roll_tensor(torch.arange(1.0, 6), shifts=-1, dims=0, packed_seq_params=params([0, 3, 5]))
    assert rolled.tolist() == [2, 3, 0, 5, 0] and total == 10


@pytest.mark.skipif(VERSION < (0, 18), reason="the router has a padding mask from 0.18")
def test_the_padding_mask_moves_with_the_tokens(applied, one_rank, monkeypatch):
    """True is padding. An unpacked row's mask is rolled as its tokens are; in a packed row what has no token to come
    is padding, and the transformer layer gets that mask."""
    layer = testing.build_gpt().mtp.layers[0]
    seen = {}

    def take(hidden_states, **rest):
        seen.update(rest)
        return hidden_states

    monkeypatch.setattr(layer, "_proj_and_transformer_layer", take)

    def moved(ids, mask, row):
        ids, mask = torch.tensor([ids]), torch.tensor([mask])
        result = layer(
            input_ids=ids,
            position_ids=ids,
            hidden_states=torch.zeros(ids.numel(), 1, 32),
            attention_mask=None,
            padding_mask=mask,
            packed_seq_params=row,
            embedding=lambda input_ids, position_ids: torch.zeros(input_ids.numel(), 1, 32),
        )
        assert torch.equal(result[-1], seen["padding_mask"])
        return result[1].tolist()[0], result[-1].tolist()[0]

    no, yes = False, True
    assert moved([1, 2, 3, 0], [no, no, no, yes], None) == ([2, 3, 0, 0], [no, no, yes, no])
    # Sequences of 3 and 2 tokens in slots of 4: the last token of each, whose successor is none, is still a token.
    ids, mask = [1, 2, 3, 0, 4, 5, 0, 0], [no, no, no, yes, no, no, yes, yes]
    assert moved(ids, mask, params([0, 3, 5], [0, 4, 8])) == (
        [2, 3, 0, 0, 5, 0, 0, 0],
        [no, no, no, yes, no, no, yes, yes],
    )


def loss_inputs(labels, input_ids, row=None):
    from megatron.core.transformer.transformer_config import TransformerConfig

    seen = []

    def compute(labels, logits):
        seen.append(labels.clone())
        return torch.ones_like(labels, dtype=torch.float32)

    config = TransformerConfig(hidden_size=8, num_layers=2, num_attention_heads=2, mtp_num_layers=1)
    states = torch.ones(2, 1, 5)
    result = mtp.process_mtp_loss(
        hidden_states=states,
        labels=labels,
        loss_mask=None,
        output_layer=lambda hidden, weight=None, runtime_gather_output=None: (hidden.clone(), None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=compute,
        config=config,
        packed_seq_params=row,
        input_ids=input_ids,
    )
    return result, states, seen


@pytest.mark.skipif(VERSION < (0, 19), reason="labels are derived from tokens from 0.19")
def test_process_mtp_loss_skips_when_no_labels_and_no_input_ids(applied):
    result, states, seen = loss_inputs(None, None)
    assert not seen and torch.equal(result, states[:1])


@pytest.mark.skipif(VERSION < (0, 19), reason="labels are derived from tokens from 0.19")
def test_process_mtp_loss_derives_labels_from_input_ids(applied):
    """Rolled once to be labels, once more for the layer; in a packed row inside each sequence."""
    ids = torch.tensor([[10, 20, 30, 40, 50]])
    assert loss_inputs(None, ids)[2][0].tolist() == [[30, 40, 50, 0, 0]]
    assert loss_inputs(None, ids, params([0, 3, 5]))[2][0].tolist() == [[30, 0, 0, 0, 0]]


@pytest.mark.skipif(VERSION < (0, 19), reason="mtp_detach_heads came with 0.19")
def test_packed_equals_alone_with_detached_heads(applied, one_rank):
    """MTP layers that train nothing of the main model: the roll is the same."""
    model = testing.build_gpt(mtp_num_layers=2, mtp_detach_heads=True)
    value, case = worst_over(model)
    assert value <= WITHIN_LAYOUT, case

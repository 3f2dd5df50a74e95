"""Patch mtp-packed-sequences on the cases of upstream's own tests of multi-token prediction.

They stand in Megatron-LM's tests/unit_tests/transformer/test_multi_token_prediction.py and need CUDA, most of them
Transformer Engine. By name, with the releases whose tags have them and where their case is met here:

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

import megatron.core.transformer.multi_token_prediction as mtp
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

import shim
from shim import testing

CELLS = {
    "0.15.3": "all",
    "0.19.2": [
        "test_the_padding_mask_moves_with_the_tokens",
        "test_process_mtp_loss_skips_when_no_labels_and_no_input_ids",
        "test_process_mtp_loss_derives_labels_from_input_ids",
        "test_packed_equals_alone_with_detached_heads",
    ],
}

ABOUT = ["mtp-packed-sequences"]  # the patches, see chosen.py

ID = "mtp-packed-sequences"
PATCHES = [ID, "mtp-recompute"]  # the sequences alone are recomputed as well, and they are not packed
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])


@pytest.fixture
def applied():
    with shim.patched(only=PATCHES, require=PATCHES):
        yield


def row_of(lengths, align=1, **options):
    return testing.pack(testing.random_sequences(lengths), align=align, **options)


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
    for lengths, align in (((5, 7, 4), 1), ((5, 7, 4), 4), ((1, 6, 2), 4)):
        row = row_of(lengths, align)
        packed, alone = testing.run_packed(model, row), testing.run_alone(model, row)
        assert testing.worst(testing.differences(packed, alone)) <= 1e-6

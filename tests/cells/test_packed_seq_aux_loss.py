"""packed-seq-aux-loss: packed rows balance experts as their sequences alone, also in a recompute."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from thorough import times
from torch._subclasses import FakeTensorMode

import shim
from shim import testing
from shim.patches.megatron_core._proof_router_losses import AUX, MODEL, PER_TOKEN, off_by
from shim.patches.megatron_core.packed_seq_aux_loss.carried import Row
from shim.patches.megatron_core.packed_seq_aux_loss.loss import of_sequences, sequence_of_token
from shim.patches.megatron_core.packed_seq_aux_loss.proof import SEQUENCES, step
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "packed-seq-aux-loss"
# What these layouts, and packed rows in multi-token prediction, need on some releases.
NAMES = ("moe-aux-loss-scale", "mtp-packed-sequences", "mtp-gather-gradient", "mtp-without-te", "moe-without-te")
OTHERS = [name for name in NAMES if shim.plan()[name].wanted]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}
BOTH = {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.05]}
LENGTHS = [(13, 4, 7), (5, 11, 8), (2, 21, 1), (24,)]


def applied():
    return shim.patched(only=[ID, *OTHERS], require=[ID])


def rows_of(lengths, align):
    """Packed rows of as many tokens each, and each of their sequences as a row of its own."""
    packed, alone = [], []
    for seed, these in enumerate(lengths):
        sequences = testing.random_sequences(these, seed=seed)
        packed.append(testing.pack(sequences, align=align, total=40))
        alone += [testing.pack([sequence]) for sequence in sequences]
    return packed, alone


def routers_after(layout, options, packed, lengths=LENGTHS, align=1):
    """Name -> gradient of the routers of this rank after a step, by their number in the whole model."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        config = {**MODEL, **SEQUENCES, "sequence_parallel": layout.sequence_parallel, **options}
        stages = [
            DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            for model in testing.build_chunks(**config)
        ]
        rows = rows_of(lengths, align)[0 if packed else 1]
        step(stages if len(stages) > 1 else stages[0], rows, packed)
        found = {}
        for stage in stages:
            for layer in stage.module.decoder.layers:
                found[f"decoder {layer.layer_number}"] = layer.mlp.router.weight.main_grad.clone()
            for number, layer in enumerate(getattr(getattr(stage.module, "mtp", None), "layers", ())):
                inside = layer.transformer_layer if hasattr(layer, "transformer_layer") else layer.mtp_model_layer
                found[f"mtp {number}"] = inside.mlp.router.weight.main_grad.clone()
        return found


def routers_with_shim(*args, **options):
    with applied():
        return routers_after(*args, **options)


def worst(found, truth):
    """found: of one rank or of several, which have each router at least once."""
    assert {name for one in found for name in one} == truth.keys()
    return max(off_by(one[name], truth[name]) for one in found for name in one)


@pytest.mark.parametrize("align", times([4], [4, 1]))
@pytest.mark.parametrize("options", [{}, PER_TOKEN, MTP, FULL, MOE], ids=["", "per token", "mtp", "full", "moe"])
def test_a_row_is_balanced_as_its_sequences_alone(options, align):
    # The mean over sequences is that of the rows' means only with as many sequences in each.
    lengths = LENGTHS if options is PER_TOKEN else LENGTHS[:3]
    with applied():
        truth = routers_after(Layout(), {**options}, False, lengths)
        found = routers_after(Layout(), {**options}, True, lengths, align)
    stock = routers_after(Layout(), {**options}, True, lengths, align) if options in ({}, PER_TOKEN) else None
    assert worst([found], truth) < 1e-5
    assert stock is None or worst([stock], truth) > 1e-2


@pytest.mark.parametrize("options", [FULL, MOE], ids=["full", "moe"])
def test_recompute_changes_no_bit(options):
    found = [routers_with_shim(Layout(), these, True) for these in (options, {})]
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items())


@pytest.mark.skipif(testing.release() < "0.14", reason="one kind of loss at a time")
def test_the_other_losses_stay_those_of_the_row():
    """Beside another loss the row's sequences are balanced as well, and the other loss is stock's."""

    def of(options):
        return routers_with_shim(Layout(), options, True)

    both, one, other = of(BOTH), of({}), of({**AUX, "moe_aux_loss_coeff": 0.05})
    assert worst([both], {name: one[name] + other[name] for name in both}) < 1e-5


@pytest.mark.parametrize(
    ("options", "packed"), [(SEQUENCES, False), (AUX, True)], ids=["no packed row", "another kind of loss"]
)
def test_what_stock_does_right_stays(options, packed):
    stock = routers_after(Layout(), options, packed)
    with shim.patched(only=[ID], require=[ID]):
        found = routers_after(Layout(), options, packed)
    assert found.keys() == stock.keys()
    assert all(torch.equal(found[name], stock[name]) for name in stock)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
def test_each_token_is_in_its_sequence(cp, tp):
    """Over all ranks each sequence has as many tokens as it is long, on the ranks that its places name."""
    row = testing.pack(testing.random_sequences([5, 0, 8, 3]), align=4 * tp, total=40)
    packed, tokens = row.packed_seq_params(), row.total // (tp * cp)
    found = torch.cat([sequence_of_token(packed, tokens, tp * cp, rank, cp) for rank in range(tp * cp)])
    whole = torch.full((row.total,), 4)
    for number, (start, length) in enumerate(row.spans):
        whole[start : start + length] = number
    places = []
    for rank in range(cp):
        for (start, _), end in zip(row.spans, row.ends, strict=True):
            chunks = torch.arange(start, end).chunk(2 * cp) if end > start else []
            places += [chunks[rank], chunks[-1 - rank]] if cp > 1 and len(chunks) else [torch.arange(start, end)]
    assert torch.equal(found, whole[torch.cat(places)])


def test_the_host_reads_nothing_and_no_shape_hangs_on_data():
    with FakeTensorMode(allow_non_fake_inputs=False):
        packed = testing.pack(testing.random_sequences([5, 3]), align=4).packed_seq_params()

        class Config:
            context_parallel_size, calculate_per_token_loss = 1, False

        scores = torch.rand(12, 4, requires_grad=True)
        of_sequences(scores, scores > 0.5, Row(packed, Config), 2, None).backward()


def test_nothing_stays_behind_after_an_error():
    from shim.patches.megatron_core.packed_seq_aux_loss.carried import row_of_call

    with testing.layout_initialised(Layout()), applied():
        model = testing.build_gpt(**{**MODEL, **SEQUENCES})

        def fail(*_):
            raise KeyboardInterrupt

        row = testing.pack(testing.random_sequences([5, 3]))
        handle = model.decoder.layers[0].mlp.register_forward_hook(fail)
        with handle, pytest.raises(KeyboardInterrupt):
            model(row.input_ids, row.position_ids, None, packed_seq_params=row.packed_seq_params())
        assert row_of_call() is None

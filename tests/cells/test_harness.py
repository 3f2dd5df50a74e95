"""The harness against stock releases: it measures what is known to be right and what is known to be wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from thorough import times
from torch.distributed import distributed_c10d as c10d

import shim
from shim import testing
from shim.testing import Layout

CELLS = "every"

VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
HAS_PACKED_MTP = VERSION >= (0, 16)
needs_packed_mtp = pytest.mark.skipif(not HAS_PACKED_MTP, reason="MTP refuses packed rows before 0.16")

WITHIN_LAYOUT, ACROSS_LAYOUTS = 1e-6, 5e-6
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}


def run(which, lengths, layout=Layout(), align=1, lora=False, masks=None, model=None, **options):
    """`which` of run_packed and run_alone, on a new model in `layout`."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        gpt = testing.build_gpt(sequence_parallel=layout.sequence_parallel, **(model or {}))
        if lora:
            testing.add_lora(gpt)
        row = testing.pack(testing.random_sequences(lengths), align=align, loss_masks=masks)
        return which(gpt, row, **options)


def packed_against_alone(*args, **kwargs):
    packed, alone = (run(which, *args, **kwargs) for which in (testing.run_packed, testing.run_alone))
    return testing.differences(packed, alone)


@pytest.mark.once
@needs_packed_mtp
@pytest.mark.parametrize("per_token_loss", [False, True], ids=["mean", "per_token"])
@pytest.mark.parametrize("mtp_num_layers", [1, 2])
@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
def test_plain_packing_is_the_same_as_running_alone(position, mtp_num_layers, per_token_loss):
    model = {"position_embedding_type": position, "mtp_num_layers": mtp_num_layers}
    found = packed_against_alone([5, 7, 4], model=model, per_token_loss=per_token_loss)
    assert testing.worst(found) < WITHIN_LAYOUT, found


@pytest.mark.once
@needs_packed_mtp
def test_loss_masks_and_sequences_of_one_token_are_in_the_truth():
    masks = [torch.tensor([0.0, 0, 1, 1, 1, 1]), torch.ones(1), torch.tensor([1.0, 0, 1, 0, 1])]
    found = packed_against_alone([6, 1, 5], masks=masks, model={"mtp_num_layers": 2})
    assert testing.worst(found) < WITHIN_LAYOUT, found
    found = packed_against_alone([6, 1, 5], loss_mask=False)
    assert testing.worst(found) < WITHIN_LAYOUT, found


@needs_packed_mtp
def test_stock_padded_packing_is_wrong_in_the_mtp_only():
    found = packed_against_alone([5, 7, 4], align=8)
    assert found["main"] < WITHIN_LAYOUT
    assert found["mtp"] > 1e-2 and found["logged"] > 1e-3 and found["grad"] > 1e-2, found


def test_padded_packing_without_mtp_is_right_on_every_release():
    found = packed_against_alone([5, 7, 4], align=8, model={"mtp_num_layers": None})
    assert testing.worst(found) < WITHIN_LAYOUT, found


@pytest.mark.skipif(HAS_PACKED_MTP, reason="packed rows are supported from 0.16")
def test_old_releases_refuse_packed_mtp_and_still_give_the_truth():
    with pytest.raises(AssertionError, match="sequence packing is not yet supported"):
        run(testing.run_packed, [5, 7, 4])
    assert run(testing.run_alone, [5, 7, 4]).logged.isfinite().all()


def test_the_truth_of_one_sequence_is_the_release_itself():
    """Unpacked rows work on every release: the explicit normalisation must reproduce its gradients."""
    for per_token_loss in (False, True):
        with testing.layout_initialised(Layout()):
            gpt = testing.build_gpt(mtp_num_layers=2)
            row = testing.pack(testing.random_sequences([9]))
            object.__setattr__(row, "packed_seq_params", lambda: None)
            options = {"per_token_loss": per_token_loss}
            stock, alone = testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options)
        found = testing.differences(stock, alone)
        assert testing.worst(found) < WITHIN_LAYOUT, found


# By whatever release computes them: the sum of the main losses, and the two logged MTP losses.
MAIN_SUM, LOGGED = 80.711349, [4.6477084, 4.4898119]


def test_every_release_holds_the_same_model():
    alone = run(testing.run_alone, [5, 7, 4], model={"mtp_num_layers": 2})
    assert float(alone.main.sum()) == pytest.approx(MAIN_SUM, rel=1e-6)
    assert alone.logged.tolist() == pytest.approx(LOGGED, rel=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2+sp"])
@pytest.mark.parametrize("model", [{}, SWIGLU, {"add_bias_linear": True}], ids=["gelu", "swiglu", "bias"])
def test_tensor_parallelism_gives_the_losses_of_one_rank(ranks2, model, sequence_parallel):
    one = run(testing.run_alone, [4, 8, 4], model=model)
    for two in ranks2.run(_alone_in_rank, Layout(tp=2, sequence_parallel=sequence_parallel), model):
        assert losses_differ(two, one) < ACROSS_LAYOUTS


@pytest.mark.once
def test_pipeline_parallelism_gives_the_losses_of_one_rank(ranks2):
    one = run(testing.run_alone, [4, 8, 4])
    first, last = ranks2.run(_alone_in_rank, Layout(pp=2), {})
    assert losses_differ(last, one) < ACROSS_LAYOUTS
    for name in ("embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight"):
        total = first.grads[name] + last.grads[name] if name.startswith("embedding") else first.grads[name]
        torch.testing.assert_close(total, one.grads[name], rtol=1e-4, atol=1e-6)


def test_a_rank_stands_in_no_embedding_group_of_the_layout_before(ranks2):
    for layouts in ([Layout(), Layout(pp=2)], [Layout(pp=2), Layout()]):
        for found in ranks2.run(_embedding_groups_in_rank, layouts):
            assert all(said == has for said, has in found), (layouts, found)


def _embedding_groups_in_rank(layouts):
    """Whether this rank is said to stand in each group of embeddings, and whether it has that group."""
    from megatron.core import parallel_state as state

    for layout in layouts:
        with testing.megatron_on_cpu(), testing.layout_initialised(layout):
            found = [
                (state.is_rank_in_embedding_group(), state._EMBEDDING_GROUP is not None),
                (state.is_rank_in_position_embedding_group(), state._POSITION_EMBEDDING_GROUP is not None),
            ]
    return found


def losses_differ(a, b):
    """Largest relative difference of any loss; gradients are sharded differently across layouts."""
    found = testing.differences(replace(a, grads={}), replace(b, grads={}))
    return max(found["main"], found["mtp"], found["logged"])


def _alone_in_rank(layout, model):
    return run(testing.run_alone, [4, 8, 4], layout, model=model)


@pytest.mark.once
@needs_packed_mtp
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(pp=2)], ids=str
)
def test_plain_packing_is_the_same_as_running_alone_in_every_layout(ranks2, layout):
    for lora in times((True,), (False, True)):
        for found in ranks2.run(_against_alone_in_rank, layout, lora):
            assert testing.worst(found) < WITHIN_LAYOUT, found


def _against_alone_in_rank(layout, lora):
    with shim.patched(only=["mtp-loss-cp"], require=["mtp-loss-cp"]):  # stock divides by the count of a rank
        return packed_against_alone([4, 8, 4], layout, lora=lora)


@pytest.mark.once
def test_lora_trains_only_its_adapters():
    with testing.layout_initialised(Layout()):
        gpt = testing.build_gpt()
        adapters = testing.add_lora(gpt)
        row = testing.pack(testing.random_sequences([6, 6]))
        optimizer = torch.optim.SGD(adapters, lr=0.1)
        frozen = {name: weight.clone() for name, weight in gpt.named_parameters() if not weight.requires_grad}
        before = testing.run_alone(gpt, row)
        assert all(".lora." in name for name in before.grads)
        assert len(before.grads) == len(adapters) and all(grad.any() for grad in before.grads.values())
        for name, weight in gpt.named_parameters():
            weight.grad = before.grads.get(name)
        optimizer.step()
        after = testing.run_alone(gpt, row)
        assert after.main.sum() < before.main.sum()
        assert all(weight.equal(frozen[name]) for name, weight in gpt.named_parameters() if name in frozen)


def test_substitutions_are_undone_after_an_exception():
    with pytest.raises(ZeroDivisionError), testing.megatron_on_cpu():
        inner = torch.cuda.current_device
        raise ZeroDivisionError
    # The test itself runs inside the fixture's substitutions.
    assert torch.cuda.current_device is inner
    assert torch.empty(1, device="cuda").device.type == "cpu"


def test_compiled_code_runs_under_the_substitutions():
    @torch.compile(backend="eager", fullgraph=True)
    def f(x):
        return x.cuda() + torch.ones(3, device="cuda") * 2

    assert f(torch.zeros(3)).tolist() == [2, 2, 2]


def test_layouts_leave_nothing_behind():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    with pytest.raises(ZeroDivisionError), testing.layout_initialised(Layout()):
        MTPLossLoggingHelper.tracker["values"] = torch.ones(1)
        raise ZeroDivisionError
    assert not parallel_state.model_parallel_is_initialized()
    assert not MTPLossLoggingHelper.tracker and not get_cuda_rng_tracker().get_states()
    assert not [x for x in vars(parallel_state).values() if isinstance(x, torch.distributed.ProcessGroup)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_groups_of_a_layout_share_a_device():
    """Each has one thread that works, and all have one that listens, which stays for the next layout."""

    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    with testing.layout_initialised(Layout()):
        pass
    before, groups = threads(), len(c10d._world.pg_map)
    with testing.layout_initialised(Layout()):
        assert 0 < threads() - before <= len(c10d._world.pg_map) - groups
    assert threads() == before


@pytest.mark.once
@pytest.mark.parametrize("device", [0, "1", "cuda", "cuda:1", torch.device("cuda", 0), torch.device("cpu")], ids=str)
def test_a_device_has_a_name_or_a_number(device):
    """Forks name the one of the process by the local rank, as a number or as the text of an environment variable."""
    assert torch.ones(2, device=device).device.type == "cpu"
    for moved in (torch.ones(2).to(device), torch.ones(2).to(device=device), torch.ones(2).to(device, torch.float64)):
        assert moved.device.type == "cpu" and moved.sum() == 2
    assert torch.ones(2).to(torch.float64).dtype == torch.ones(2).to(torch.ones(1).double()).dtype == torch.float64


@pytest.mark.once
def test_no_stream_is_captured_and_all_events_have_happened():
    assert torch.cuda.is_current_stream_capturing() is False
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    torch.cuda.current_stream(0).wait_event(event)
    assert event.query() and event.elapsed_time(torch.cuda.Event()) == 0

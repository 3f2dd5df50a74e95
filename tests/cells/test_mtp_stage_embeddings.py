"""mtp-stage-embeddings: copies of the embeddings begin and stay equal, wherever a layout has its MTP layers."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from needed import needed
from thorough import in_full, times

import shim
from shim import testing
from shim.testing import Layout, sharded
from shim.testing.cpu import optimizer_on_cpu
from shim.testing.schedules import run_microbatches

CELLS = {"0.17.1": "all"}

ID = "mtp-stage-embeddings"
pytestmark = needed(ID)
E, T, M, L = "embedding", "decoder", "mtp", "loss"

MIDDLE = [[E, T], [T, M], [L]]
ALONE = [[E, T], [T], [M], [L]]
FIRST = [[E, T, T, M], [L]]
LAST = [[E, T], [T], [M, L]]
# Of two virtual stages on each of three ranks, in the order in which a row runs through them.
VIRTUAL = [[E], [T], [T], [T], [M], [L]]


@contextlib.contextmanager
def inside(layout):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        yield


def chunks_of(stages, layout, *, seeded=False, frozen=False, distributed=False, **options):
    """The models of this rank, each with DistributedDataParallel around it.

    seeded: weights are those of one rank. Without, each rank has others, as after an initialisation.
    """
    virtual = {"virtual_pipeline_model_parallel_size": layout.vp} if layout.vp > 1 else {}
    on_stages = {"pipeline_model_parallel_size": layout.pp, "pipeline_model_parallel_layout": stages}
    models = testing.build_chunks(
        mtp_num_layers=1,
        num_layers=sum(part.count(T) for part in stages),
        sequence_parallel=layout.sequence_parallel,
        **(on_stages if layout.pp > 1 else {}),
        **virtual,
        **options,
    )
    torch.manual_seed(dist.get_rank())
    for model in models if not seeded else []:
        for weight in model.parameters():
            weight.data.normal_(0, 0.1)
        if model.pre_process or model.post_process or model.mtp_process:
            model.setup_embeddings_and_output_layer()
    for model in models:
        for name, weight in model.named_parameters():
            weight.requires_grad_(not (frozen and "word_embeddings" in name))
    config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    return [DistributedDataParallel(model.config, config, model) for model in models]


def copies(chunks):
    """The embeddings and the output layer of this rank, by name."""
    found = {}
    for chunk in chunks:
        for name, weight in chunk.module.named_parameters():
            if "word_embeddings" in name:
                found["embeddings"] = weight.detach().clone()
            elif name == "output_layer.weight" and not chunk.module.share_embeddings_and_output_weights:
                found["output layer"] = weight.detach().clone()
            elif name == "output_layer.weight":
                found["tied"] = weight.detach().clone()
    return found


def forward(row, chunk):
    places = torch.arange(row.numel())[None]
    losses = chunk(row, places, None, labels=row.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def passes(chunks, layout, number=0):
    """Forward and backward of some rows, and the sums of gradients."""
    for chunk in chunks:
        chunk.module.config.finalize_model_grads_func = finalize_model_grads
        chunk.zero_grad_buffer()
    generator = torch.Generator().manual_seed(number)
    rows = [torch.randint(0, 64, (1, 16), generator=generator) for _ in range(6)]
    run_microbatches(chunks, rows, forward, 16)


def shimmed():
    return shim.patched(only=[ID, "layout-pp-rank"], require=[ID])


def trained(stages, layout, options):
    """Copies of the embeddings before and after some steps of Adam, on this rank."""
    with inside(layout), shimmed():
        chunks = chunks_of(stages, layout, **options)
        before = copies(chunks)
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=options.get("distributed", False)
        )
        optimizer = optimizer_on_cpu(settings, chunks)
        for number in range(times(3, 10)):
            optimizer.zero_grad()
            passes(chunks, layout, number)
            optimizer.step()
        return before, copies(chunks)


def judged(ranks, tied, frozen=False):
    """The copies of all stages are equal before and after, moved, and are not the output layer."""
    for when in (0, 1):
        found = [copy for rank in ranks for name, copy in rank[when].items() if name != "output layer"]
        assert len(found) == (3 if tied else 2)
        assert all(torch.equal(copy, found[0]) for copy in found) and found[0].any()
        if not tied:
            [output] = [rank[when]["output layer"] for rank in ranks if "output layer" in rank[when]]
            assert not torch.allclose(output, found[0])
    moved = not torch.equal(ranks[0][0]["embeddings"], ranks[0][1]["embeddings"])
    assert moved is not frozen


TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@TIED
@pytest.mark.parametrize(
    "layout, stages, options",
    [
        (Layout(pp=3), MIDDLE, {}),
        pytest.param(Layout(pp=4), ALONE, {}, marks=in_full),
        pytest.param(Layout(pp=3), MIDDLE, {"distributed": True}, marks=in_full),
        (Layout(pp=3, vp=2), VIRTUAL, {}),
    ],
    ids=["middle", "alone", "distributed optimizer", "virtual"],
)
def test_copies_begin_and_stay_equal(ranks, layout, stages, options, tied):
    options = {"share_embeddings_and_output_weights": tied, **options}
    judged(ranks[layout.world].run(trained, stages, layout, options), tied)


@in_full  # six ranks
@TIED
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_under_tensor_parallelism_too(tied, sequence_parallel):
    """Each tensor-parallel rank has its part of each copy."""
    layout = Layout(tp=2, pp=3, sequence_parallel=sequence_parallel)
    with testing.Ranks(layout.world) as ranks:
        found = ranks.run(trained, MIDDLE, layout, {"share_embeddings_and_output_weights": tied})
    for rank in range(layout.tp):
        judged(found[rank :: layout.tp], tied)


class Saved:
    """What `sharded` saves and loads of this rank's model."""

    def __init__(self, chunks):
        (self.model,) = (chunk.module for chunk in chunks)

    def sharded_state_dict(self):
        return {"model": self.model.sharded_state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"], strict=False)  # stock saves no state of attention without kernels


def shimmed_for_files():
    return shim.patched(only=[ID, "layout-pp-rank", "mtp-tied-checkpoint"], require=[ID])


def saved(stages, layout, directory, tied):
    """The copies of this rank, which it has saved."""
    with inside(layout), shimmed_for_files():
        chunks = chunks_of(stages, layout, share_embeddings_and_output_weights=tied)
        sharded.save(Saved(chunks), directory)
        return copies(chunks)


def loaded(stages, layout, directory, tied):
    """The copies of this rank from the file of another layout."""
    with inside(layout), shimmed_for_files():
        chunks = chunks_of(stages, layout, seeded=True, share_embeddings_and_output_weights=tied)
        sharded.load(Saved(chunks), directory)
        return copies(chunks)


@TIED
def test_a_checkpoint_loads_under_another_layout(ranks, tmp_path, tied):
    found = ranks[3].run(saved, MIDDLE, Layout(pp=3), str(tmp_path), tied)
    whole = {name: copy for rank in found for name, copy in rank.items()}
    for stages, layout in (([[E, T, T, M, L]], Layout()), ([[E, T], [T, M, L]], Layout(pp=2))):
        for rank in ranks[layout.world].run(loaded, stages, layout, str(tmp_path), tied):
            assert rank and all(torch.equal(copy, whole[name]) for name, copy in rank.items())


def test_frozen_embeddings_stay(ranks):
    options = {"frozen": True, "share_embeddings_and_output_weights": False}
    judged(ranks[3].run(trained, MIDDLE, Layout(pp=3), options), tied=False, frozen=True)


def gradients(stages, layout, tied):
    with inside(layout), shimmed():
        chunks = chunks_of(stages, layout, seeded=True, share_embeddings_and_output_weights=tied)
        passes(chunks, layout)
        return {
            name: weight.main_grad.clone()
            for chunk in chunks
            for name, weight in chunk.module.named_parameters()
            if name in ("embedding.word_embeddings.weight", "output_layer.weight")
        }


@TIED
@pytest.mark.parametrize("layout, stages", [(Layout(pp=3), MIDDLE), (Layout(pp=2), FIRST)], ids=["middle", "first"])
def test_gradients_are_those_of_one_rank(ranks, layout, stages, tied):
    truth = gradients([[E, T, T, M, L]], Layout(), tied)
    for found in ranks[layout.world].run(gradients, stages, layout, tied):
        for name, gradient in found.items():
            right = truth[name if not tied else "embedding.word_embeddings.weight"]
            assert (gradient - right).norm() <= 5e-6 * right.norm(), name


def sent(stages, layout, tied, embedding_ranks=None):
    """How many sends and receives of this rank belong to a model's setup and to one sum of its gradients."""
    embedding_ranks = embedding_ranks or parallel_state.default_embedding_ranks
    with mock.patch.object(parallel_state, "default_embedding_ranks", embedding_ranks), inside(layout), shimmed():
        with (
            mock.patch.object(dist, "send", side_effect=dist.send) as sends,
            mock.patch.object(dist, "recv", side_effect=dist.recv) as receives,
            mock.patch.object(dist, "new_group", side_effect=dist.new_group) as groups,
        ):
            chunks = chunks_of(stages, layout, seeded=True, share_embeddings_and_output_weights=tied)
            begun = sends.call_count + receives.call_count
            finalize_model_grads(chunks)
            assert not groups.called
        return begun, sends.call_count + receives.call_count - begun


def with_mtp(ranks):
    return ranks[:2]


@pytest.mark.parametrize(
    "stages, tied, embedding_ranks, expected",
    [
        (LAST, False, None, [(0, 0)] * 3),
        (LAST, True, None, [(0, 0)] * 3),
        (MIDDLE, False, with_mtp, [(0, 0)] * 3),
        (VIRTUAL, False, with_mtp, [(0, 0)] * 3),
        (MIDDLE, False, None, [(1, 2), (1, 2), (0, 0)]),
        (MIDDLE, True, None, [(1, 2), (1, 2), (0, 0)]),
    ],
    ids=["last untied", "last tied", "a caller's group", "a caller's group, virtual", "middle untied", "middle tied"],
)
def test_messages_are_sent_where_the_group_is_wrong(ranks, stages, tied, embedding_ranks, expected):
    assert ranks[3].run(sent, stages, Layout(pp=3, vp=len(stages) // 3), tied, embedding_ranks) == expected

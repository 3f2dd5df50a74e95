"""mtp-overlapped-gradients: the unused weight takes part in sums over replicas, and no other weight is touched."""

import contextlib

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

import shim
from shim import testing
from shim.patches.megatron_core.mtp_overlapped_gradients import unused_weights
from shim.patches.megatron_core.mtp_overlapped_gradients.proof import gradient_of_embeddings
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "mtp-overlapped-gradients"
BUILT_BY = [id for id in ("mtp-without-te",) if shim.plan()[id].wanted]


@contextlib.contextmanager
def two_stages():
    with shim.patched(only=[ID, *BUILT_BY], require=[ID]), testing.megatron_on_cpu():
        with testing.layout_initialised(Layout(pp=2)):
            yield


def gradient(sums):
    with two_stages():
        return gradient_of_embeddings(**sums)


def found_on(ranks, **sums):
    return [grad for grad in ranks.run(gradient, sums) if grad is not None]


@pytest.mark.parametrize("bucket_size", [None, 1, 3000], ids=["one bucket", "one each", "some"])
def test_stages_have_the_gradient_that_sums_at_the_end_give(ranks2, bucket_size):
    """Also if the unused weight is alone in its bucket, as a large one is."""
    right = found_on(ranks2, overlapped=False)
    found = found_on(ranks2, overlapped=True, bucket_size=bucket_size)
    assert len(found) == 2 and all(map(torch.equal, right, found))


def test_replicas_have_the_same_gradient(ranks4):
    right = found_on(ranks4, overlapped=False)
    found = found_on(ranks4, overlapped=True, bucket_size=3000)
    assert len(found) == 4 and all(map(torch.equal, right, found))


def unused_names(options):
    with two_stages():
        model = testing.build_gpt(pipeline_model_parallel_size=2, **options)
        names = {id(weight): name for name, weight in model.named_parameters()}
        return [(names[id(copy)], names[id(weight)]) for copy, weight in unused_weights(model)]


def test_only_the_copy_of_tied_embeddings_on_a_stage_of_mtp_has_an_unused_weight(ranks2):
    pair = ("embedding.word_embeddings.weight", "output_layer.weight")
    assert ranks2.run(unused_names, {}) == [[], [pair]]
    assert ranks2.run(unused_names, {"share_embeddings_and_output_weights": False}) == [[], []]
    assert ranks2.run(unused_names, {"mtp_num_layers": None}) == [[], []]


def wrapped_hooks(sums):
    """The names of weights whose hook is not upstream's."""
    with two_stages():
        model = testing.build_gpt(pipeline_model_parallel_size=2)
        whole = DistributedDataParallel(model.config, DistributedDataParallelConfig(**sums), model)
        hooks = {name: whole._make_backward_post_hook(weight) for name, weight in model.named_parameters()}
        return [name for name, hook in hooks.items() if hasattr(hook, "__wrapped__")]


def test_other_hooks_are_upstreams(ranks2):
    assert ranks2.run(wrapped_hooks, {"overlap_grad_reduce": True}) == [[], ["embedding.word_embeddings.weight"]]
    assert ranks2.run(wrapped_hooks, {}) == [[], []]

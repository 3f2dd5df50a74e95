"""mtp-full-embeddings: layers train as with an embedding that scatters, bit for bit, and keep no more for backward."""

import contextlib

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from thorough import in_full, times
from unscattered_cases import CASES, FULL, LENGTHS, MODELS, equal, outcome

import shim
from shim import testing
from shim.patches.megatron_core.mtp_full_embeddings.proof import TOKENS, build, step
from shim.testing import Layout

CELLS = {"0.12.0": "all"}

ID = "mtp-full-embeddings"
NEEDED = shim.plan()[ID].wanted
pytestmark = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
SP2 = Layout(tp=2, sequence_parallel=True)
# What packed rows, full recompute and tensor parallelism need beside it, each on some releases.
BESIDE = ("mtp-packed-sequences", "mtp-recompute", "mtp-gather-gradient", "rope-thd")


@contextlib.contextmanager
def inside(layout, patched=True):
    """patched: False for stock with what it needs beside, True for the patch as well, "all" for all patches."""
    ids = (ID, *BESIDE) if patched else BESIDE
    chosen = {} if patched == "all" else {"only": ids}
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        with shim.patched(**chosen, require=[ID] if patched else []):
            yield


def results(layout, scatters, kind, options, patched=True):
    """What a rank gets of a row whose embeddings a wrapper gives. scatters: whether the model's own embedding does."""
    with inside(layout, patched):
        model = build(layout.sequence_parallel, scatters, **{"num_layers": 2, **options})
        row = testing.pack(testing.random_sequences(LENGTHS[kind]), align=8)
        generator = torch.Generator().manual_seed(2)
        states = torch.randn(row.input_ids.numel(), 1, model.config.hidden_size, generator=generator)
        found = testing.run_packed(model, row, decoder_input=states)
        return outcome(found)


@pytest.mark.parametrize(("kind", "model"), CASES[:: times(2, 1)])
def test_the_bits_of_an_embedding_that_scatters(ranks2, kind, model):
    """Which is right on stock."""
    options = MODELS[model]
    right = ranks2.run(results, SP2, True, kind, options, False)
    assert all(map(equal, ranks2.run(results, SP2, False, kind, options), right))


def test_with_all_patches(ranks2):
    right = ranks2.run(results, SP2, True, "packed", FULL, "all")
    assert all(map(equal, ranks2.run(results, SP2, False, "packed", FULL, "all"), right))


@in_full
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sequence_parallel=True, cp=2), Layout(tp=2, sequence_parallel=True, pp=2)], ids=str
)
def test_on_four_ranks(ranks4, layout):
    right = ranks4.run(results, layout, True, "packed", {}, False)
    assert all(map(equal, ranks4.run(results, layout, False, "packed", {}), right))


@pytest.mark.parametrize(
    ("layout", "scatters"),
    [(SP2, True), (Layout(tp=2), True), (Layout(tp=2), False)],
    ids=["with sp", "tp alone", "tp alone, whole"],
)
def test_what_stock_does_right_stays(ranks2, layout, scatters):
    right = ranks2.run(results, layout, scatters, "one", {}, False)
    assert all(map(equal, ranks2.run(results, layout, scatters, "one", {}), right))


class OfWrapper:
    """As Megatron-Bridge's: gives the layers of a model that does not scatter what it has scattered itself."""

    def __init__(self, embedding):
        self.embedding, self.calls = embedding, 0
        self.word_embeddings = embedding.word_embeddings

    def __call__(self, **given):
        self.calls += 1
        return mappings.scatter_to_sequence_parallel_region(self.embedding(**given))


def with_embedding_of_wrapper(patched):
    """The weights after a step, and how often the layers have called the wrapper's embedding."""
    with inside(SP2, patched):
        model = build(True, False)
        own = OfWrapper(model.embedding)
        block = model.mtp.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "embedding": own}), with_kwargs=True
        )
        step(model, 0)
        block.remove()
        return {name: weight.detach() for name, weight in model.named_parameters()}, own.calls


def test_an_embedding_of_a_wrapper_that_scatters(ranks2):
    """It is right on stock, and nobody scatters twice."""
    right = ranks2.run(with_embedding_of_wrapper, False)
    for (found, calls), (expected, _) in zip(ranks2.run(with_embedding_of_wrapper, True), right):
        assert calls == 2 and all(torch.equal(found[name], expected[name]) for name in expected)


def kept(copies):
    """The bytes behind what the norm of each layer gets of the embeddings."""
    with inside(SP2):
        model = build(True, False, clone_scatter_output_in_embedding=copies)
        found = []
        for layer in model.mtp.layers:
            layer.enorm.register_forward_pre_hook(lambda _, given: found.append(given[0].untyped_storage().nbytes()))
        step(model, 0)
        return found


@pytest.mark.parametrize("copies", [True, False])
def test_the_whole_row_is_not_kept(ranks2, copies):
    """As upstream's embedding has it: unless the config wants no copy."""
    share = TOKENS // 2 * 32 * 4
    for found in ranks2.run(kept, copies):
        assert found == [share if copies else 2 * share] * 2


def lengths_that_fit_nothing():
    with inside(SP2):
        model = build(True, False)
        embedding = model.mtp.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "embedding": lambda **_: torch.zeros(6, 1, 32)}),
            with_kwargs=True,
        )
        try:
            step(model, 0)
        except RuntimeError as error:
            return str(error)
        finally:
            embedding.remove()


def test_other_lengths_are_for_upstream_to_judge(ranks2):
    assert all("Sizes of tensors must match" in said for said in ranks2.run(lengths_that_fit_nothing))


def own(self, *args, **kwargs):
    """A trainer's method in the place of the fixed one. What it does with embeddings nobody knows."""
    raise NotImplementedError


def checked(layout, scatters, replaces):
    """What check() says of a model whose method that calls the embedding is a trainer's, if it replaces it."""
    with inside(layout):
        model = build(layout.sequence_parallel, scatters)
        if replaces:
            layer = model.mtp.layers[0]
            caller, name = (layer, "_get_embeddings") if hasattr(layer, "_get_embeddings") else (model.mtp, "forward")
            caller.__class__ = type("Own", (type(caller),), {name: own})
        return shim.check(model)[ID]


@pytest.mark.parametrize(
    ("layout", "scatters", "replaces", "state"),
    [
        (SP2, False, False, "applied"),
        (SP2, False, True, "unknown"),
        (SP2, True, True, "applied"),
        (Layout(tp=2), False, True, "applied"),
    ],
    ids=str,
)
def test_what_check_says(ranks2, layout, scatters, replaces, state):
    """A method of a trainer is a matter of this patch only if the layers would get the whole row."""
    for found in ranks2.run(checked, layout, scatters, replaces):
        assert found.state == state
        assert ("shim does not try whether it scatters" in found.reason) is (state == "unknown")

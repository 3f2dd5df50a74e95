"""gpt-dataset-loss-mask: each row has the mask of its own padding, in this process and in data workers."""

import pickle
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from thorough import in_full
from torch.utils.data import DataLoader

import shim
from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, sample_index, text_of, write_corpus

CELLS = {"0.16.0": "all"}

ID = "gpt-dataset-loss-mask"
LENGTH, PAD, EOD, EPOCHS = 8, 0, 1, 3
# Written with padding behind each document, so that rows of training have padding at different places.
DOCUMENTS = [[*range(2, 2 + length), EOD, *[PAD] * (length % 3 + 1)] for length in (3, 9, 2, 12, 5, 7, 4, 10)]
TOKENIZER = Tokenizer(PAD, EOD)


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(DOCUMENTS, tmp_path)


def training(prefix, **options):
    return gpt_dataset(prefix, LENGTH, TOKENIZER, epochs=EPOCHS, **options)


def right_masks(dataset):
    return torch.stack([(text_of(dataset, row)[1:] != PAD).float() for row in range(len(dataset))])


def masks(rows):
    return torch.stack([row["loss_mask"].clone() for row in rows])


def compiled_helpers():
    """megatron-core's C++, or skip: it is not there for each Python, and _proof_corpus may stand in for it."""
    module = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="not compiled here")
    if module.__spec__ is None:
        pytest.skip("not compiled here")
    return module


def applied():
    return shim.patched(only=[ID], require=[ID])


def apply_in_worker(_):
    shim.apply(only=[ID], require=[ID])


def loaded(dataset, method, init=None):
    """The masks of two passes over the dataset by two workers, which live for both, with the tokens of the rows."""
    loader = DataLoader(
        dataset, 2, num_workers=2, multiprocessing_context=method, worker_init_fn=init, persistent_workers=True
    )
    passes = [[(batch["tokens"], batch["loss_mask"]) for batch in loader] for _ in range(2)]
    return [tuple(map(torch.cat, zip(*found, strict=True))) for found in passes]


def assert_right(dataset, found):
    for tokens, found_masks in found:
        assert torch.equal(found_masks, right_masks(dataset))
        assert torch.equal(tokens, torch.stack([text_of(dataset, row)[:-1] for row in range(len(dataset))]))


def test_each_row_of_training_in_any_order(prefix):
    stock = training(prefix)
    assert not torch.equal(masks(stock), right_masks(stock))
    with applied():
        for order in (range(len(stock)), range(len(stock) - 1, -1, -1)):
            dataset = training(prefix)
            for _ in range(2):
                assert torch.equal(masks(dataset[row] for row in order), right_masks(dataset)[list(order)])


def test_forked_workers(prefix):
    stock = training(prefix)
    assert not torch.equal(loaded(stock, "fork")[1][1], right_masks(stock))
    with applied():
        dataset = training(prefix)
        assert_right(dataset, loaded(dataset, "fork"))


def test_a_copy_as_spawned_workers_get_it(prefix):
    with applied():
        dataset = training(prefix)
        dataset[0]  # what the parent keeps goes to the workers
        copy = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(masks(copy[row] for row in range(len(copy))), right_masks(dataset))


@in_full
def test_spawned_workers_that_apply(prefix):
    with applied():
        dataset = training(prefix)
        assert_right(dataset, loaded(dataset, "spawn", apply_in_worker))


@in_full
def test_spawned_workers_below_shim_run(prefix, monkeypatch):
    for name, value in shim.run_environment(only=[ID], require=[ID]).items():
        monkeypatch.setenv(name, value)
    with applied():
        dataset = training(prefix)
        dataset[0]  # what the parent keeps goes to the workers
        assert_right(dataset, loaded(dataset, "spawn"))


def test_a_blend_in_workers(tmp_path):
    """Two corpora through megatron-core's own builder."""
    compiled_helpers()
    prefixes = []
    for name, documents in (("one", DOCUMENTS), ("two", DOCUMENTS[::-1])):
        (tmp_path / name).mkdir()
        prefixes.append(write_corpus(documents, tmp_path / name))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=(prefixes, [0.5, 0.5]),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=TOKENIZER,
    )
    with applied():
        blend = BlendedMegatronDatasetBuilder(GPTDataset, [20, 0, 0], lambda: True, config).build()[0]
        right = [
            right_masks(blend.datasets[which])[row]
            for which, row in zip(blend.dataset_index, blend.dataset_sample_index, strict=True)
        ]
        for _, found in loaded(blend, "fork"):
            assert torch.equal(found, torch.stack(right))


def test_the_index_of_stock_is_read(prefix):
    """Neither names nor contents of the files change, and none is written anew."""

    def files():
        return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}

    folder = Path(prefix).with_name("index")
    training(prefix)
    before = files()
    with applied():
        training(prefix)[0]
    assert before and files() == before


def test_what_is_costly_is_still_kept(prefix):
    with applied():
        dataset = training(prefix, create_attention_mask=True)
        first, second = dataset[0], dataset[1]
    assert first["attention_mask"] is second["attention_mask"]
    assert first["position_ids"] is second["position_ids"]
    assert first["loss_mask"] is not second["loss_mask"]


def test_what_a_caller_writes_into_a_mask_stays_there(prefix):
    with applied():
        dataset = training(prefix)
        for row in range(len(dataset)):
            dataset[row]["loss_mask"].zero_()
        assert torch.equal(masks(dataset), right_masks(dataset))


def test_the_row_that_fills_a_batch(prefix):
    """It is asked for by None, and has row 0's padding, but no target."""
    with applied():
        dataset = training(prefix)
        assert not dataset[None]["loss_mask"].any()
        assert torch.equal(masks(dataset), right_masks(dataset))


def test_after_an_error_in_the_first_row(prefix, monkeypatch):
    with applied():
        dataset = training(prefix)
        with monkeypatch.context() as broken, pytest.raises(OSError, match="no file"):
            broken.setattr(dataset.dataset, "get", lambda *_, **__: (_ for _ in ()).throw(OSError("no file")))
            dataset[0]
        assert torch.equal(masks(dataset), right_masks(dataset))


@pytest.mark.parametrize("option", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_masks_that_are_not_kept_are_those_of_stock(prefix, option):
    stock = [dict(row) for row in training(prefix, create_attention_mask=True, **{option: True})]
    with applied():
        found = list(training(prefix, create_attention_mask=True, **{option: True}))
    assert len(found) == len(stock) > EPOCHS
    for row, expected in zip(found, stock, strict=True):
        assert row.keys() == expected.keys() and all(torch.equal(row[name], expected[name]) for name in row)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_without_compiled_code_begin_where_they_do_with_it(drop_last, extra):
    """_proof_corpus has an index builder in Python, for a checkout."""
    compiled = compiled_helpers()
    rng = numpy.random.default_rng(0)
    for epochs in (1, 3):
        sizes = rng.integers(1, 20, 30, dtype=numpy.int32)
        documents = numpy.concatenate([rng.permutation(30).astype(numpy.int32) for _ in range(epochs)])
        begins = numpy.cumsum(numpy.insert(sizes[documents], 0, 0))
        arguments = (sizes, documents, LENGTH, epochs, int(sizes.sum()), drop_last, extra)
        both = [build(*arguments) for build in (compiled.build_sample_idx_int32, sample_index)]
        # A row may begin behind the last token of a document, or at the first of the next one.
        expected, found = (begins[index[:, 0]] + index[:, 1] for index in both)
        assert found.tolist() == expected.tolist() and len(found) > 20 * epochs

"""gpt-dataset-index-settings: an index is found by all that it depends on, and that of stock stays where it was."""

from pathlib import Path

import pytest

import shim
from shim.patches.megatron_core._proof_corpus import write_corpus
from shim.patches.megatron_core.gpt_dataset_index_settings.proof import DOCUMENTS, EXTRA, LAST, rows

CELLS = {"0.19.2": "all"}

ID = "gpt-dataset-index-settings"
BOTH = [{LAST: last, EXTRA: extra} for last in (True, False) for extra in (True, False)]
reads_only = pytest.mark.parametrize("flag", ["fast_cache_load", "defer_npy_index_mmap"])


def applied():
    return shim.patched(only=[ID], require=[ID])


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(DOCUMENTS, tmp_path)


def files(prefix):
    return sorted(path.name for path in Path(prefix).with_name("index").iterdir())


def test_each_setting_has_its_own_rows_in_any_order(prefix, tmp_path):
    with applied():
        first = [rows(prefix, **settings) for settings in BOTH]
        again = [rows(prefix, **settings) for settings in reversed(BOTH)]
    assert first == again[::-1]
    for number, settings in enumerate(BOTH):
        new = tmp_path / str(number)
        new.mkdir()
        assert first[number] == rows(write_corpus(DOCUMENTS, new), **settings)


def test_the_index_of_the_defaults_is_stocks(prefix):
    """It is found with and without the patch."""
    stock = rows(prefix)
    before = files(prefix)
    with applied():
        assert rows(prefix) == stock
    assert files(prefix) == before


def test_only_validation_has_a_last_row(prefix):
    """The setting means nothing to other splits, whose index is stock's."""
    from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset

    def names(**settings):
        gpt_dataset(prefix, 8, Tokenizer(0, 1), epochs=3, **settings)
        return files(prefix)

    with applied():
        assert names(**{LAST: True}) == names(**{LAST: False})


@reads_only
def test_what_only_reads_takes_its_own_index_or_stocks(prefix, flag):
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    if not hasattr(GPTDatasetConfig, flag):
        pytest.skip("this release has no such option")
    settings = {EXTRA: False}
    options = {**settings, flag: True, "blend": None, "split": None, "blend_per_split": [([prefix], None)] * 3}
    rows(prefix, **{**options, flag: False})
    with applied():
        from_stocks = rows(prefix, **options)
        rows(prefix, **{**options, flag: False})
        own = rows(prefix, **options)
    assert from_stocks == own == rows(prefix, **{**options, flag: False})

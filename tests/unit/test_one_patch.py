"""`make patch ID=...`: which releases and tests it takes, and what it says at its end."""

import pytest
from unit_helpers import REPOSITORY

from shim._matrix.load import load_matrix
from shim.maintenance import one_patch
from shim.maintenance.one_patch import files_about, main, representatives

MATRIX = load_matrix()


@pytest.mark.parametrize(
    ("id", "releases"),
    [
        ("frozen-recompute", ["0.17.1", "0.19.2"]),  # two variants
        ("masked-microbatch", ["0.13.1", "0.14.0", "0.19.2"]),  # two variants, and right from 0.15 on
        ("te-skip-weight-update", ["0.18.1", "0.19.2"]),  # beside TE 2.14.1 and 2.20.2
    ],
)
def test_each_variant_and_what_needs_none_has_its_newest_release(id, releases):
    assert representatives(MATRIX, id) == releases


def test_tests_with_transformer_engine_run_on_pairs_of_every_day():
    pairs = ["0.17.1+2.14.1", "0.18.2+2.16.1", "0.19.2+2.20.2"]
    assert representatives(MATRIX, "te-skip-weight-update", pairs=True) == pairs


def test_the_files_about_a_patch_have_its_name_or_name_it():
    """A longer name is that of another patch."""
    found = {id: {file.name for file in files_about(REPOSITORY, MATRIX, id)} for id in MATRIX.patches}
    assert found["te-cross-entropy"] >= {"test_te_cross_entropy.py"}
    assert not found["te-cross-entropy"] & found["te-cross-entropy-copy"]
    assert [id for id, files in found.items() if not files] == []


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Everything but what needs releases."""
    monkeypatch.setattr(one_patch, "_pin", lambda id: MATRIX)
    monkeypatch.setattr(one_patch, "_run_tests", lambda matrix, id, files: True)
    monkeypatch.setattr(one_patch, "prove_on", lambda matrix, release, ids: False)
    monkeypatch.setattr(one_patch.load, "PACKAGE", tmp_path / "shim")
    monkeypatch.setattr(one_patch, "left_to_do", lambda top, matrix, id: [])
    (tmp_path / "docs" / "patches").mkdir(parents=True)
    (tmp_path / "tests" / "cells").mkdir(parents=True)
    return tmp_path


def test_it_writes_the_page_and_says_what_is_left(run, monkeypatch, capsys):
    assert main(["frozen-recompute"]) == 0
    said = capsys.readouterr().out
    assert "wrote docs/patches/frozen-recompute.md\n" in said
    assert said.endswith("Left to do:\n  tests: no file is about frozen-recompute\n")
    (run / "tests" / "cells" / "test_frozen_recompute.py").touch()
    main(["frozen-recompute"])
    assert capsys.readouterr().out.endswith(" s\nNothing is left to do.\n")


def test_a_failure_is_said_last_and_by_the_code(run, monkeypatch, capsys):
    monkeypatch.setattr(one_patch, "prove_on", lambda matrix, release, ids: True)
    assert main(["frozen-recompute"]) == 1
    assert capsys.readouterr().out.endswith("  a test or a proof has failed, see above\n")


def test_a_patch_that_is_not_there_is_named(capsys):
    assert main(["frozen-recompte"]) == 2
    assert "did you mean 'frozen-recompute'" in capsys.readouterr().err

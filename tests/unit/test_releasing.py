"""What docs/releasing.md asks for before a release can be built: with SHIM_RELEASING=1, as the page says."""

import os
import re

import pytest
from packaging.version import Version
from unit_helpers import REPOSITORY

import shim
from shim._matrix.load import load_matrix
from shim._releases.known_files import known_files
from shim.maintenance import docs
from shim.maintenance.changes import fragments
from shim.maintenance.pin_some import without_results

pytestmark = pytest.mark.skipif(os.environ.get("SHIM_RELEASING") != "1", reason="only before a release")
MATRIX = load_matrix()
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")


def test_the_address_is_set():
    """Of the repository, in pyproject.toml: links of the package lead there."""
    urls = (REPOSITORY / "pyproject.toml").read_text("utf-8").partition("[project.urls]\n")[2].partition("\n\n")[0]
    addresses = re.findall(r'^\w+ = "(.+)"$', urls, flags=re.MULTILINE)
    (repository,) = re.findall(r'^Repository = "(.+)"$', urls, flags=re.MULTILINE)
    assert len(addresses) == 4 and all(address.startswith(repository) for address in addresses)
    assert repository.startswith("https://")


def test_the_version_is_one_of_a_release():
    version = Version(shim.__version__)
    assert not version.is_prerelease and version.local is None


def test_the_documents_of_all_patches_are_current(capsys):
    """README's counts, the tables and the pictures, which only a release writes: run `make docs-all`."""
    assert docs.main(["--check", "--all"]) == 0, capsys.readouterr().out


def test_the_table_of_files_has_every_body():
    """So that a plan on a release parses nothing: run `make pins`."""
    known = {f"{m}:{name}" for m, files in known_files().items() for bodies in files.values() for name in bodies}
    assert {body for entry in MATRIX.patches.values() for body in entry.bodies} <= known


@pytest.mark.parametrize("id", MATRIX.patches)
def test_the_proofs_of_each_patch_have_run_on_every_release(id):
    """A patch may come with the results of some: run `make proofs`."""
    assert without_results(MATRIX, id) == []


def test_the_citation_names_the_version():
    cited = (REPOSITORY / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.+)$", cited, flags=re.MULTILINE) == [shim.__version__]


def test_the_changelog_has_the_version_with_a_date_and_nothing_that_is_not_released():
    """Its first section is this version, none is without one, and no fragment is left in changes/."""
    sections = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert re.match(rf"\[{re.escape(shim.__version__)}\] - \d{{4}}-\d\d-\d\d\n", sections[0])
    assert not [section for section in sections if section.startswith("[Unreleased]")]
    assert fragments(REPOSITORY) == []

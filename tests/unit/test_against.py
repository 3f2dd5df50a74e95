"""`--against`: a source tree in place of what is installed, as the commands that run it see it."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from unit_helpers import write_file

from shim._tools.fetching import first_on_path


@pytest.fixture
def checkout(tmp_path):
    """Transformer Engine as git has it: the version in a file of its build, and no metadata."""
    write_file(tmp_path / "transformer_engine/__init__.py", "")
    write_file(tmp_path / "transformer_engine/pytorch/__init__.py", "")
    write_file(tmp_path / "build_tools/VERSION.txt", "2.21.0.dev0\n")
    return tmp_path


def test_a_checkout_of_transformer_engine_has_a_version(checkout):
    """Else its own import of its version fails, and none of its proofs can run."""
    before = list(sys.path)
    with first_on_path(str(checkout)) as tree:
        assert version("transformer_engine") == "2.21.0.dev0"
        assert tree.environment.installed["transformer-engine"].raw == "2.21.0.dev0"
        assert str(checkout) in sys.path
    assert sys.path == before
    with pytest.raises(PackageNotFoundError):
        version("transformer_engine")


def test_an_installation_keeps_its_metadata(checkout):
    write_file(
        checkout / "transformer_engine-2.21.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.21.0\n",
    )
    before = len(sys.path)
    with first_on_path(str(checkout)):
        assert version("transformer_engine") == "2.21.0" and len(sys.path) == before + 1

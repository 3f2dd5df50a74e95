"""Versions and ranges: what is no version is None, pre-releases count, and the local part decides nothing."""

import pytest
from packaging.version import Version

from shim._releases.versions import in_range, parse_range, parse_version, with_prereleases


@pytest.mark.parametrize("raw", [None, "", "unknown", "0.16.0-custom-x", "1." + "9" * 5000 + "!x"])
def test_what_is_no_version_is_none(raw):
    assert parse_version(raw) is None


def test_vendors_and_nightlies_have_versions():
    assert parse_version("0.16.0rc1+abc").public == "0.16.0rc1"
    assert parse_version("0.17.0.dev20260101") < Version("0.17.0")


@pytest.mark.parametrize(
    ("version", "spec", "inside"),
    [
        ("0.16.0", ">=0.16,<0.17", True),
        ("0.16.0rc1", ">=0.16", False),  # it comes before 0.16
        ("0.16.1rc1", ">=0.16,<0.17", True),
        ("0.16.0+local", "==0.16.0", True),
        ("0.17.0.dev1", "<0.17.dev0", False),
        ("0.16.5", "==0.16.*", True),
        ("3.0", "", True),
    ],
)
def test_pre_releases_count_and_local_parts_do_not(version, spec, inside):
    assert in_range(Version(version), spec) is inside


@pytest.mark.parametrize("spec", ["0.16", ">=x", "===0.16.0-x!", "~0.16"])
def test_what_is_no_range_is_an_error(spec):
    with pytest.raises(ValueError):
        parse_range(spec)


def test_a_bound_means_its_first_development_version():
    """1.2rc1 belongs to what starts at 1.2, and not to what ends there."""
    spec = with_prereleases(">=1.1, <1.2")
    assert spec == ">=1.1.dev0, <1.2.dev0"
    assert in_range(Version("1.1rc1"), spec) and not in_range(Version("1.2rc1"), spec)
    for other in ("==1.2.*", "!=1.1", ">=1.1.dev0", "<1.2rc1", "<=1.2", ">1.1"):
        assert with_prereleases(other) == other

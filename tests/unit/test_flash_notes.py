"""The notes of te-flash-local-version: whether FlashAttention 2 is on beside a Transformer Engine, and why not."""

from importlib.metadata import PackageNotFoundError

import pytest
from packaging.version import Version

from shim.patches.transformer_engine.te_flash_local_version import notes


def said(monkeypatch, te, flash):
    def version(name):
        assert name == "flash-attn"
        if flash is None:
            raise PackageNotFoundError(name)
        return flash

    monkeypatch.setattr(notes, "version", version)
    return list(notes.notes({"transformer-engine": Version(te)} if te else {}))


@pytest.mark.parametrize(
    ("te", "newest"),
    [("2.1.0", "2.7.4.post1"), ("2.5.0", "2.7.4.post1"), ("2.6.0.post1", "2.8.1"), ("2.10.0", "2.8.3")],
)
def test_the_newest_that_each_release_takes(monkeypatch, te, newest):
    assert said(monkeypatch, te, newest) == []
    assert said(monkeypatch, te, "2.7.2+cu12") == []  # right on stock
    (labelled,) = said(monkeypatch, te, f"{newest}+cu12torch2.9")
    assert labelled.startswith("FlashAttention 2 is on") and f"{newest}+cu12torch2.9" in labelled
    for other in ("2.9.0", "2.9.0+cu12", "2.0.9"):
        (refused,) = said(monkeypatch, te, other)
        assert refused.startswith("FlashAttention 2 is off") and f"flash-attn=={newest}" in refused and other in refused
    (missing,) = said(monkeypatch, te, None)
    assert "not installed" in missing and f"flash-attn=={newest}" in missing


def test_it_says_nothing_where_it_knows_nothing(monkeypatch):
    assert said(monkeypatch, None, "2.8.3") == []
    assert said(monkeypatch, "2.14.1", "no version") == []

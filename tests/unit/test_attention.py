"""What is said of FlashAttention and fused attention, from the source of Transformer Engine, versions and variables."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from packaging.version import Version

from shim._releases.sources import Sources
from shim._tools import notes as attention

OLD, NEW = "attention.py", "attention/dot_product_attention/utils.py"
CONSTANT = {
    OLD: '_flash_attn_max_version = PkgVersion("{}")\ndef f():\n    _flash_attn_max_version = PkgVersion("2.1")\n',
    NEW: 'class FlashAttentionUtils:\n    version_required = PkgVersion("2.1.1")\n    max_version = PkgVersion("{}")\n',
}
LABELLED = SimpleNamespace(wanted=True, action="apply")


@pytest.fixture
def said(monkeypatch, tmp_path):
    for variable in (attention.FLASH_ON, attention.FUSED_ON, attention.UNFUSED_ON):
        monkeypatch.delenv(variable, raising=False)

    def notes(newest="2.8.3", labels=None, file=NEW, te="2.14.0", **wheels):
        def version(name):
            if name.replace("-", "_") not in wheels:
                raise PackageNotFoundError(name)
            return wheels[name.replace("-", "_")]

        monkeypatch.setattr(attention, "version", version)
        path = tmp_path / "transformer_engine/pytorch" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONSTANT[file].format(newest) if newest else "", "utf-8")
        installed = {"transformer-engine": SimpleNamespace(version=Version(te))} if te else {}
        decisions = {} if labels is None else {attention.LABELS: labels}
        return list(attention.attention_notes(SimpleNamespace(installed=installed), decisions, Sources([tmp_path])))

    return notes


@pytest.mark.parametrize(("file", "newest"), [(OLD, "2.7.4.post1"), (NEW, "2.8.1"), (NEW, "2.8.4")])
def test_the_newest_that_is_taken_stands_in_the_source(said, file, newest):
    assert said(newest, file=file, flash_attn=newest)[0] == f"FlashAttention 2 is on: flash-attn {newest}"
    for other in ("2.9.0", "2.9.0+cu12", "2.0.9"):
        refused = said(newest, file=file, flash_attn=other)[0]
        assert refused.startswith("FlashAttention 2 is off") and f"flash-attn=={newest}" in refused and other in refused
    missing = said(newest, file=file)[0]
    assert "not installed" in missing and f"flash-attn=={newest}" in missing


def test_a_label_is_left_to_the_patch(said):
    assert said(flash_attn="2.7.2+cu12", labels=LABELLED)[0].endswith("on: flash-attn 2.7.2+cu12")  # right on stock
    newest = "2.8.3+cu12torch2.9"
    assert attention.LABELS in said(flash_attn=newest, labels=LABELLED)[0]
    left_out = said(flash_attn=newest, labels=SimpleNamespace(wanted=False, action="excluded"))[0]
    assert (
        left_out.startswith("FlashAttention 2 is off") and "for newer" in left_out and "which is excluded" in left_out
    )
    assert said(flash_attn=newest, labels=SimpleNamespace(wanted=False, action="upstream"))[0].endswith(newest)


def test_variables_switch_kinds_off(said, monkeypatch):
    assert "unfused attention is on" in said()[-1] and "NVTE_DEBUG_LEVEL=2" in said()[-1]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    flash, others = said(flash_attn="2.8.3")
    assert flash == "FlashAttention is off by NVTE_FLASH_ATTN=0"
    assert "off by NVTE_FUSED_ATTN=0" in others and "off by NVTE_UNFUSED_ATTN=0" in others


def test_later_generations_are_named_if_they_are_installed(said):
    assert not any("FlashAttention 3" in note for note in said())
    assert any(note.startswith("FlashAttention 3: flash-attn-3 3.0.0b1") for note in said(flash_attn_3="3.0.0b1"))


def test_it_says_what_it_cannot_know(said):
    assert said(te=None) == []
    assert "cannot be read" in said(newest="", flash_attn="2.8.3")[0]
    assert "cannot be compared" in said(flash_attn="no version")[0]

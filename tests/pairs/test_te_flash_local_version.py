"""te-flash-local-version: a labelled wheel is as good as a plain one, in both orders, and all else is left to stock."""

import sys
from unittest import mock

import pytest

import shim
from shim.patches.transformer_engine._proof_flash_attention import chosen, home
from shim.patches.transformer_engine.te_flash_local_version import FUNCTIONS, HOMES
from shim.patches.transformer_engine.te_flash_local_version.proof import (
    BLACKWELL,
    HOPPER,
    LABEL,
    PACKED,
    flash_attn,
    imported_with,
    newest_allowed,
    takes_flash,
)

CELLS = {"0.12.0+2.2.0": "all"}

ID = "te-flash-local-version"
PLAN = shim.plan(rounding=True)[ID]
pytestmark = pytest.mark.skipif(not PLAN.wanted, reason="this release needs no patch")
NEWEST = newest_allowed()
LABELLED = f"{NEWEST}+{LABEL}"


def patched():
    return shim.patched(only=[ID], require=[ID])


def findings(module):
    """What the import has found of FlashAttention 2, and its functions by what they are."""
    owner = vars(getattr(home(), "FlashAttentionUtils", home()))
    names = [name for name in owner if name.startswith(("v2_", "_flash_attn_2_")) or name.endswith("is_installed")]
    names += [name for name in ("version", "_flash_attn_version") if name in owner]
    functions = {name: vars(module)[name] for name in FUNCTIONS}
    return {name: owner[name] for name in names}, {name: found and found() for name, found in functions.items()}


def ask(capability=HOPPER):
    return chosen(capability, flash=False, **PACKED)


@pytest.mark.parametrize("capability", [(8, 0), HOPPER, BLACKWELL])
def test_a_labelled_wheel_is_as_good_as_a_plain_one(capability):
    """Shim is there before the import."""
    with imported_with(NEWEST, capability) as module:
        plain, choice = findings(module), ask(capability)
    assert choice[0] and all(plain[1].values())
    with patched(), imported_with(LABELLED, capability) as module:
        assert ask(capability) == choice
        assert findings(module) == plain


def test_shim_after_the_import_and_after_an_attention():
    with imported_with(LABELLED) as module:
        stock = findings(module)
        assert not ask()[0] and not any(stock[1].values())
        with patched() as report:
            assert ask()[0]
            assert report[ID].state == "applied"
            assert shim.status()[ID].holds == (f"FlashAttention {LABELLED} in Transformer Engine's attention",)
            assert module.flash_attn_func() == "flash_attn_func"
        assert findings(module) == stock  # all of it is taken back
        assert not ask()[0]
        with patched():  # and entered again
            assert ask()[0]


def test_another_choice_is_made_after_shim_is_reverted():
    with imported_with(LABELLED):
        with patched():
            ask()
            in_use = sys.modules[HOMES[PLAN.variant].in_use]._attention_backends
            in_use["backend_selection_requires_update"] = False
        assert in_use["backend_selection_requires_update"] is True


def test_all_other_versions_are_left_to_stock():
    found = {}
    for only in ([], [ID]):
        with shim.patched(only=only):
            for version in (NEWEST, "2.7.2", f"2.7.2+{LABEL}", "2.9.0", f"2.9.0+{LABEL}", "2.1.0", f"2.1.0+{LABEL}"):
                found.setdefault(version, []).append(takes_flash(version))
    assert all(stock == ours for stock, ours in found.values()), found
    assert found[f"2.7.2+{LABEL}"] == [True, True] and found[f"2.9.0+{LABEL}"] == [False, False]


def test_blackwell_asks_for_a_newer_one():
    with patched():
        assert not takes_flash(f"2.7.2+{LABEL}", BLACKWELL)


def test_one_that_cannot_be_imported_is_left_out_and_said(caplog):
    with patched(), imported_with(LABELLED) as module:
        stock = findings(module)
        with mock.patch.dict(sys.modules, dict.fromkeys(flash_attn())):  # each import raises
            assert not ask()[0]
            assert not ask()[0]
        assert findings(module) == stock
    said = [record.getMessage() for record in caplog.records if record.name == "shim" and ID in record.getMessage()]
    assert len(said) == 1 and f"FlashAttention {LABELLED} cannot be imported" in said[0]


def test_without_flash_attention_nothing_is_imported():
    with patched(), mock.patch.dict(sys.modules, dict.fromkeys(flash_attn())):
        assert not ask()[0]
        assert shim.status()[ID].holds == ()

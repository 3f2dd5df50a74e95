"""Pins are written by `shim pin`, belong to the rules and the supported list, and are never edited by hand."""

import functools
import json
import re
import shutil

import pytest
from unit_helpers import MATRIX, SOURCES, megatron

from shim._errors import MatrixError
from shim._matrix.load import load_matrix, lock_path, matrix_path
from shim._tools.support import stale
from shim.maintenance.pin import measure, write
from shim.maintenance.tables import render_pins
from shim.testing import cells


def test_the_shipped_pins_belong_to_the_rules_and_the_supported_list():
    """After a change of variants, ranges or releases: run `make pins`."""
    assert stale(load_matrix()) == []


def test_the_shipped_pins_are_as_written():
    """Their text is what `shim pin` would write of the same fingerprints."""
    assert lock_path(matrix_path()).read_text("utf-8") == render_pins(load_matrix().pins)


def test_pins_round_trip(world):
    """What was measured is what is read back; releases with the same body share a line."""
    matrix = load_matrix(world.matrix)
    assert matrix.pins == measure(matrix, lambda _, release: world.root / "releases" / release)
    assert stale(matrix) == []
    found = json.loads(lock_path(world.matrix).read_text())["faster-forward"]["only"][
        "megatron.core.roll:Layer.forward"
    ]
    assert sorted(found.values()) == [["0.16.0"], ["0.17.0", "0.18.0"]]


def test_a_new_release_with_known_bodies_adds_itself_to_their_lines(world):
    """So that the diff of a release shows what it changed; each body has a line."""
    before = lock_path(world.matrix).read_text().splitlines()
    shutil.copytree(world.root / "releases/0.17.0", world.root / "releases/0.17.1")
    world.pin(MATRIX.replace('"0.17.0", ', '"0.17.0", "0.17.1", ', 1))
    after = lock_path(world.matrix).read_text().splitlines()
    assert len(before) == len(after)
    changed = [(old, new) for old, new in zip(before, after) if old != new]
    assert len(changed) == 3  # the bodies of variant new of roll-fix, and that of faster-forward
    assert all(new == old.replace('"0.17.0"', '"0.17.0", "0.17.1"') for old, new in changed)


def test_writing_twice_changes_nothing(world):
    """And leaves the rules alone."""
    text = lock_path(world.matrix).read_text()
    assert not write(world.matrix, text)
    assert world.matrix.read_text() == MATRIX
    world.matrix.write_text(MATRIX.replace("rolls stay", "rolls really stay"))
    assert not write(world.matrix, text)
    assert not list(world.root.glob("*.new"))


def test_a_release_that_is_right_is_pinned_as_upstream(world):
    """Its bodies tell a vendor's backport of the fix."""
    pin = load_matrix(world.matrix).pins["megatron-core"]["0.18.0"]["roll-fix"]
    assert pin.variant is None
    assert set(pin.fingerprints) == {
        "megatron.core.roll:roll",
        "megatron.core.roll:Layer.forward",
        "megatron.core.roll:helper",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            r'"megatron.core.roll:helper": \{\s+"[^"]+": \["0.16.0"\]',
            r'"megatron.core.roll:helper": {',
            "body of variant old",
        ),
        (r'"megatron.core.roll:helper":', '"megatron.core.roll:help":', "but not both"),
        (r'(      "megatron.core.roll:)roll":', r'\1helper":', "duplicate key 'megatron.core.roll:helper'"),
        (r'"old":', '"older":', "there is no variant 'older'"),
        (r'"old":', '"upstream":', "duplicate key"),
        (r'"[0-9a-f]{4}([0-9a-f]{12}\.)', r'"\1', "is not a fingerprint"),
        (r'\["0.16.0"\]', '"0.16.0"', "must have a list of releases"),
        (r'\["0.16.0"\]', "[]", "must have a list of releases"),
        (r'\["0.16.0"\]', "[0.16]", "must have a list of releases"),
        (r'\["0.16.0"\]', '["0.16.0", "0.16.0"]', "has two bodies"),
        (r'\["0.16.0"\]', '["0.15.0"]', "pinned but not in the supported list"),
        (r'"roll-fix":', '"gone-fix":', "there is no patch 'gone-fix'"),
        (r'"old": \{', '"old": 3, "older": {', "roll-fix old must be a mapping"),
        (r"\A\{", "", "cannot be read as JSON"),
        (r"\A", "[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_hand_edits_are_errors(world, old, new, message):
    """Changed key sets, formats and names; each names the file and the remedy."""
    file = lock_path(world.matrix)
    edited, count = re.subn(old, new, file.read_text(), count=1)
    assert count == 1
    file.write_text(edited)
    with pytest.raises(MatrixError, match=rf"matrix.lock.json:\d+: (?s:.*){re.escape(message)}(?s:.*)run shim pin"):
        load_matrix(world.matrix)


@pytest.mark.parametrize(
    ("old", "new"), [('"old":', '"older":'), ('"megatron.core.roll:helper":', '"megatron.core.roll:help":')]
)
def test_pins_of_changed_variants_and_reads_can_be_measured_anew(world, monkeypatch, capsys, old, new):
    """The error names the command, which loads the cells: they do without pins then, and run no test on them."""
    monkeypatch.setattr(cells, "load_matrix", functools.partial(load_matrix, world.matrix))
    file = lock_path(world.matrix)
    file.write_text(file.read_text().replace(old, new, 1))
    assert not any(cells._matrix().pins["megatron-core"].values())
    assert cells.main(["--releases", "0.16.0"]) == 1
    assert capsys.readouterr().out.endswith("; run shim pin --patch roll-fix\n")


def test_an_upstream_pin_names_only_bodies_of_the_patch(world):
    """It was measured like the others."""
    file = lock_path(world.matrix)
    before, upstream, after = file.read_text().partition('"upstream"')
    file.write_text(before + upstream + after.replace("roll:helper", "roll:other", 1))
    with pytest.raises(MatrixError, match="roll:other is pinned, but is no body of roll-fix"):
        load_matrix(world.matrix)


def test_pins_that_others_may_write_are_refused(world):
    """They decide what is applied as the rules do."""
    lock_path(world.matrix).chmod(0o666)
    with pytest.raises(MatrixError, match=r"matrix.lock.json:1: may be written by everybody"):
        load_matrix(world.matrix)


def test_pins_are_part_of_what_names_a_matrix_of_ones_own(world):
    """Ranks compare that name."""
    before = load_matrix(world.matrix).content
    file = lock_path(world.matrix)
    file.write_text(file.read_text() + "\n")
    assert load_matrix(world.matrix).content != before


def test_a_release_without_pins_is_stale(world):
    """Someone added a release to the supported list and did not run `shim pin`."""
    world.matrix.write_text(MATRIX.replace('"0.17.0", ', '"0.17.0", "0.17.1", ', 1))
    assert stale(load_matrix(world.matrix)) == [
        "megatron-core 0.17.1 lacks a pin of roll-fix, variant new",
        "megatron-core 0.17.1 lacks a pin of faster-forward, variant only",
    ]


def test_a_pin_of_another_variant_than_the_rules_say_is_stale(world):
    """Someone moved a range and did not run `shim pin`."""
    text = world.matrix.read_text().replace("<0.17.0.dev0", "<0.18.0.dev0", 1)
    text = text.replace('{megatron-core: ">=0.17.0.dev0,<0.18.0.dev0"', '{megatron-core: "<0.16.0.dev0"', 1)
    world.matrix.write_text(text)
    assert stale(load_matrix(world.matrix, check_ranges=False)) == [
        "megatron-core 0.17.0 pins new of roll-fix; the rules say old"
    ]


def test_targets_that_a_release_lacks_cannot_be_pinned(world):
    """The rules and the release disagree; the message says which of them to correct."""
    megatron(world.root / "releases" / "0.17.0", "0.17.0", {"roll.py": "x = 1\n"})
    with pytest.raises(
        MatrixError, match=r"roll-fix: the rules give variant new to megatron-core 0.17.0, but .* has no"
    ):
        world.pin(MATRIX)


def test_pinning_needs_no_readable_pins(world):
    """Whoever is about to write them anew must not stumble over the old ones."""
    lock_path(world.matrix).write_text("broken")
    assert load_matrix(world.matrix, pins=False).pins == {"megatron-core": {release: {} for release in SOURCES}}

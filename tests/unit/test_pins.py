"""Pins are written by `shim pin`, belong to the rules and the supported list, and are never edited by hand."""

import re

import pytest
from unit_helpers import MATRIX, REWORKED, SOURCES, megatron

from shim._errors import MatrixError
from shim._matrix.load import load_matrix, matrix_path
from shim._tools.pin import MARKER, measure, release_environment, render, stale, write


def test_the_shipped_pins_belong_to_the_rules_and_the_supported_list():
    """After a change of variants, ranges or releases: run `make pins`."""
    assert stale(load_matrix()) == []


def test_the_shipped_pins_are_as_written():
    """Their text is what `shim pin` would write of the same fingerprints."""
    matrix = load_matrix()
    assert matrix_path().read_text("utf-8").endswith(render(matrix.pins))


def test_pins_round_trip(world):
    """What was measured is what is read back; releases with the same bodies share one entry."""
    matrix = load_matrix(world.matrix)
    assert matrix.pins == measure(matrix, lambda _, release: world.root / "releases" / release)
    assert stale(matrix) == []
    assert "faster-forward: *faster-forward-0-17-0" in world.matrix.read_text()


def test_writing_twice_changes_nothing(world):
    """And leaves what is above the marker alone."""
    text = world.matrix.read_text()
    assert not write(world.matrix, text[text.index(MARKER) :])
    assert text.startswith(MATRIX.rstrip("\n"))
    world.matrix.write_text(text.replace("rolls stay", "rolls really stay"))
    assert not write(world.matrix, text[text.index(MARKER) :])
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


def pins_of(world):
    text = world.matrix.read_text()
    return text[: text.index("releases:")], text[text.index("releases:") :]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"          megatron.core.roll:helper: .*\n", "", "is pinned or a body of variant old"),
        (r"megatron.core.roll:helper:", "megatron.core.roll:help:", "but not both"),
        (r"(          megatron.core.roll:)helper(: .*\n)", r"\1helper\2\1helper\2", "duplicate key"),
        (r"variant: old", "variant: older", "there is no variant 'older'"),
        (r"variant: old\n", "variant: old\n        when: now\n", "unknown key 'when'"),
        (r"variant: old", "variant: upstream\n        extra: x", "unknown key 'extra'"),
        (r'helper: "[0-9a-f]{4}', 'helper: "', "is not a fingerprint"),
        (r'helper: ".*"', 'helper: ""', "is empty"),
        (r'helper: ".*"', "helper: 1234567812345678", "must be text"),
        (r"roll-fix: &", "gone-fix: &", "there is no patch 'gone-fix'"),
        (r'"0.16.0":', '"0.15.0":', "pinned but not in the supported list"),
        (r"  megatron-core:", "  megatron:", "unknown key 'megatron'"),
    ],
)
def test_hand_edits_are_errors(world, old, new, message):
    """Changed key sets, formats and names; each with file and line."""
    head, pins = pins_of(world)
    edited, count = re.subn(old, new, pins, count=1)
    assert count == 1
    world.matrix.write_text(head + edited)
    with pytest.raises(MatrixError, match=rf"matrix.yaml:\d+: .*{re.escape(message)}"):
        load_matrix(world.matrix)


def test_an_upstream_pin_names_only_bodies_of_the_patch(world):
    """It was measured like the others."""
    head, pins = pins_of(world)
    before, upstream, after = pins.partition("variant: upstream")
    world.matrix.write_text(head + before + upstream + after.replace("roll:helper", "roll:other", 1))
    with pytest.raises(MatrixError, match="roll:other is pinned, but is no body of roll-fix"):
        load_matrix(world.matrix)


def test_a_release_without_pins_is_stale(world):
    """Someone added a release to the supported list and did not run `shim pin`."""
    text = world.matrix.read_text().replace('"0.17.0", ', '"0.17.0", "0.17.1", ', 1)
    world.matrix.write_text(text)
    assert stale(load_matrix(world.matrix)) == [
        "megatron-core 0.17.1 lacks a pin of roll-fix, variant new",
        "megatron-core 0.17.1 lacks a pin of faster-forward, variant only",
    ]


def test_a_pin_of_another_variant_than_the_rules_say_is_stale(world):
    """Someone moved a range and did not run `shim pin`."""
    text = world.matrix.read_text().replace("<0.17.0.dev0", "<0.18.0.dev0", 1)
    text = text.replace('      - {megatron-core: ">=0.17.0.dev0,<0.18.0.dev0"', '      - {torch: "<1", ', 1)
    text = re.sub(r'\{torch: "<1", +,', '{megatron-core: "<0.16.0.dev0",', text)
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
    head, _ = pins_of(world)
    world.matrix.write_text(head + "releases: [broken]\n")
    assert load_matrix(world.matrix, pins=False).pins == {}


def test_an_unpacked_release_is_an_environment_of_its_own(world):
    """What cells and audits plan with; nothing on sys.path counts."""
    world.install(REWORKED, "0.17.0")
    root = world.root / "releases" / "0.16.0"
    environment = release_environment("megatron-core", "megatron.core", "0.16.0", root)
    assert environment.sources.path("megatron.core.roll") == str(root / "megatron/core/roll.py")
    assert [str(found.version) for found in environment.installed.values()] == ["0.16.0"]
    assert set(SOURCES) == {"0.16.0", "0.17.0", "0.18.0"}

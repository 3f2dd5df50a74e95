"""Pins inside of a matrix, as shim 0.1 wrote them: they are read, and `shim pin --releases` takes them out."""

import re

import pytest
from unit_helpers import MATRIX

from shim._errors import MatrixError
from shim._matrix.load import load_matrix
from shim._matrix.pins import lock_path
from shim._tools.pin import INLINE, write


@pytest.fixture
def inline(world):
    """The pins of the fake world inside of its matrix, with an alias for what is there twice."""
    lines, seen = [INLINE, "releases:"], {}
    for distribution, releases in load_matrix(world.matrix).pins.items():
        lines.append(f"  {distribution}:")
        for release, pins in releases.items():
            lines.append(f'    "{release}":')
            for id, pin in pins.items():
                content = [f"        variant: {pin.variant or 'upstream'}", "        fingerprints:"]
                content += [f'          {target}: "{body}"' for target, body in pin.fingerprints.items()]
                name = seen.setdefault((id, *content), f"{id}-{len(seen)}")
                first = f"&{name}" not in "".join(lines)
                lines += [f"      {id}: &{name}", *content] if first else [f"      {id}: *{name}"]
    world.pins = load_matrix(world.matrix).pins
    world.matrix.write_text(MATRIX + "\n" + "\n".join(lines) + "\n")
    world.lock = lock_path(world.matrix).read_text()
    lock_path(world.matrix).unlink()
    return world


def test_they_are_read(inline):
    """As if they stood beside."""
    assert load_matrix(inline.matrix).pins == inline.pins


def test_pins_in_two_places_are_an_error(inline):
    """Nobody could tell which of them count."""
    lock_path(inline.matrix).write_text(inline.lock)
    with pytest.raises(MatrixError, match=r"matrix.yaml:\d+: pins stand here and in .*matrix.lock.json; take the key"):
        load_matrix(inline.matrix)


def test_writing_pins_takes_them_out(inline):
    """And leaves what is above the marker."""
    assert write(inline.matrix, inline.lock)
    assert inline.matrix.read_text() == MATRIX
    assert load_matrix(inline.matrix).pins == inline.pins


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
def test_hand_edits_are_errors(inline, old, new, message):
    """Changed key sets, formats and names; each with file and line."""
    text = inline.matrix.read_text()
    head, pins = text[: text.index("releases:")], text[text.index("releases:") :]
    edited, count = re.subn(old, new, pins, count=1)
    assert count == 1
    inline.matrix.write_text(head + edited)
    with pytest.raises(MatrixError, match=rf"matrix.yaml:\d+: .*{re.escape(message)}"):
        load_matrix(inline.matrix)


def test_pins_without_the_marker_are_taken_out_too(inline):
    """As in a matrix that somebody has put in order; what stands below them stays."""
    rules, _, pins = inline.matrix.read_text().partition(INLINE)
    head, _, patches = rules.partition("patches:")
    inline.matrix.write_text(head + pins.lstrip() + "# a note\n\npatches:" + patches)
    assert load_matrix(inline.matrix).pins == inline.pins
    assert write(inline.matrix, inline.lock)
    assert inline.matrix.read_text() == MATRIX.replace("patches:", "# a note\n\npatches:")
    assert load_matrix(inline.matrix).pins == inline.pins

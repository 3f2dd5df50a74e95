"""Records behave as frozen dataclasses do, as far as shim uses those."""

import copy
import pickle
from functools import cached_property

import pytest

from shim._record import EMPTY, Record, replace


class Point(Record):
    """With a default, and one field that is neither compared nor shown."""

    _aside = ("note",)

    x: int
    y: int = 2
    note: str = ""

    @cached_property
    def sum(self):
        return self.x + self.y


class Named(Point):
    """One more field."""

    name: str = "here"


def test_fields_are_given_by_place_or_name_or_have_defaults():
    """In the order of the annotations, those of the base first."""
    assert Point(1).to_plain() == {"x": 1, "y": 2, "note": ""}
    assert Point(1, y=3).to_plain() == Point(y=3, x=1).to_plain() == {"x": 1, "y": 3, "note": ""}
    assert Named(1, 2, "note", "there").to_plain() == {"x": 1, "y": 2, "note": "note", "name": "there"}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "Point lacks x"),
        ((), {"y": 1}, "Point lacks x"),
        ((1, 2, 3, 4), {}, "Point takes 3 fields, and 4 were given"),
        ((1,), {"x": 1}, "Point got x twice"),
        ((1,), {"z": 1}, "Point got z which are no fields of it"),
        ((), {"z": 1}, "Point got z which are no fields of it"),
    ],
)
def test_wrong_fields_are_errors(args, kwargs, message):
    """As wrong arguments are."""
    with pytest.raises(TypeError, match=message):
        Point(*args, **kwargs)


def test_equality_and_hash_are_those_of_the_fields():
    """And of the class; what is aside does not count."""
    assert Point(1, note="a") == Point(1, note="b") and hash(Point(1)) == hash(Point(1, note="b"))
    assert Point(1) != Point(2) and Point(1) != Named(1) and Point(1) != (1, 2, "")
    assert repr(Named(1, note="b")) == "Named(x=1, y=2, name='here')"


def test_records_are_immutable():
    """But for what a cached property keeps."""
    point = Point(1)
    with pytest.raises(AttributeError, match="Point is immutable: cannot set 'x'"):
        point.x = 2
    with pytest.raises(AttributeError, match="Point is immutable: cannot delete 'x'"):
        del point.x
    assert point.sum == 3 and point == Point(1)


def test_a_copy_has_other_values_in_the_fields_named():
    """And none of what the original has computed."""
    point = Point(1, note="a")
    assert point.sum == 3
    changed = replace(point, x=5)
    assert (changed.x, changed.y, changed.note, changed.sum) == (5, 2, "a", 7)
    with pytest.raises(TypeError, match="no fields"):
        replace(point, z=1)


def test_records_are_copied_and_pickled():
    """Reports travel between processes."""
    point = Point(1, note="a")
    for again in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert again == point and again.note == "a" and type(again) is Point


def test_the_shared_default_is_empty():
    """Nobody writes to it."""
    assert EMPTY == {}

"""record, against the frozen dataclass that it stands for, and computed_once beside its fields."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from shim import _record
from shim._record import computed_once, record


@record
class Point:
    """A point."""

    x: int
    y: int = 2

    @computed_once
    def sum(self):
        """Of both."""
        CALLS.append(self)
        return self.x + self.y


CALLS = []


def test_it_is_computed_once_and_is_no_field():
    CALLS.clear()
    point = Point(1)
    assert (point.sum, point.sum, len(CALLS)) == (3, 3, 1)
    assert point == Point(1) and hash(point) == hash(Point(1)) and repr(point) == "Point(x=1, y=2)"
    assert Point.sum.__doc__ == "Of both."


def test_a_changed_copy_computes_it_anew():
    point = Point(1)
    assert point.sum == 3
    assert replace(point, x=5).sum == 7


def test_it_is_copied_and_pickled():
    """Reports travel between processes."""
    point = Point(1)
    assert point.sum == 3
    for again in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert again == point and again.sum == 3 and type(again) is Point


def fields_of(made):
    @made
    class Kinds:
        """Each kind of field."""

        given: int
        default: str = "a"
        made: list = field(default_factory=list)
        apart: int = field(default=0, compare=False)
        silent: int = field(default=0, repr=False)

    return Kinds


def test_its_own_replace_is_that_of_dataclasses():
    """Fields that are not compared or shown go along, and what was computed does not."""
    point = Point(1)
    assert point.sum == 3 and _record.replace(point, x=5).sum == 7
    kinds = fields_of(record)(1, made=[2], apart=3, silent=4)
    for given in ({}, {"given": 2}, {"apart": 0, "made": []}):
        assert vars(_record.replace(kinds, **given)) == vars(replace(kinds, **given))
    assert _record.replace(kinds).made is kinds.made
    with pytest.raises(TypeError):
        _record.replace(kinds, unknown=1)


BOTH = [fields_of(record), fields_of(dataclass(frozen=True))]


@pytest.mark.parametrize("kind", BOTH, ids=["record", "dataclass"])
def test_a_record_is_a_frozen_dataclass(kind):
    one, other = kind(1), kind(given=1, default="a", made=[], apart=5, silent=0)
    assert one == other and one != kind(2) and one != object() and kind(1).made is not one.made
    assert repr(other).endswith("Kinds(given=1, default='a', made=[], apart=5)")
    assert [item.name for item in fields(kind)] == list(vars(one)) and replace(one, given=3) == kind(3)
    assert hash(kind(1, made=())) == hash(kind(1, made=(), apart=7))
    for change in (lambda: setattr(one, "given", 2), lambda: delattr(one, "given"), lambda: setattr(one, "new", 2)):
        with pytest.raises(FrozenInstanceError):
            change()


@pytest.mark.parametrize("kind", BOTH, ids=["record", "dataclass"])
@pytest.mark.parametrize(
    ("given", "named"), [((), {}), ((1, "a", [], 0, 0, 0), {}), ((1,), {"given": 1}), ((1,), {"odd": 1})]
)
def test_a_call_that_misses_or_invents_a_field_is_a_type_error(kind, given, named):
    with pytest.raises(TypeError):
        kind(*given, **named)

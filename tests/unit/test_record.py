"""computed_once, beside the fields of a frozen dataclass."""

import copy
import pickle
from dataclasses import dataclass, replace

from shim._record import computed_once


@dataclass(frozen=True)
class Point:
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

"""What code calls is read from its byte code, whatever its text says and wherever its text is."""

import functools

import pytest

from shim._engine.reach import attributes_in, reads_first, reads_of


class Base:
    def forward(self):
        return self


held = functools.partial(print)


def by_super():
    class Inner(Base):
        def forward(self):
            return super().forward()

    return Inner.forward


def by_super_with_arguments():
    class Inner(Base):
        def forward(self):
            return super(Inner, self).forward()  # noqa: UP008 - the form is the point

    return Inner.forward


def another_name_by_super():
    class Inner(Base):
        def forward(self):
            super().__init__()
            return self.inner.forward()

    return Inner.forward


@pytest.mark.parametrize("function", [by_super, by_super_with_arguments, another_name_by_super])
def test_a_method_by_super_is_told_from_one_of_another_object(function):
    assert (("super", "forward") in reads_of(function().__code__)) == (function is not another_name_by_super)


def test_a_path_begins_with_a_name_and_has_attributes():
    inner = Base()

    def code(x):
        from functools import wraps

        functools.partial(held, x.first.second, inner.forward)
        return lambda: wraps.name

    reads = reads_of(code.__code__)
    assert {("global", "functools", "partial"), ("global", "held"), ("local", "x", "first", "second")} <= set(reads)
    assert {("closure", "inner", "forward"), ("import", "functools", "wraps")} <= set(reads)
    assert attributes_in(reads) == {"partial", "first", "second", "forward", "name"}


def test_what_an_import_within_a_package_names_keeps_its_dots():
    code = compile("def f():\n    from ..two import name\n    return name", "none", "exec")
    assert ("import", "..two", "name") in reads_of(code)


def test_decorators_defaults_and_annotations_call_nothing():
    def function(x: held = held):
        held = x
        return held(held)

    assert all(read[0] == "local" for read in reads_of(function.__code__))


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda first, second: first(second), True),
        (lambda first, second: lambda: first(second), True),
        (lambda first, second: second, False),
        (lambda: held, False),
    ],
)
def test_whether_the_first_parameter_is_read(function, reads):
    assert reads_first(function.__code__) == reads

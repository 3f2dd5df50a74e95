"""shim.patches._arguments: an argument is read and replaced where a call of Python has it, whatever its kind."""

import inspect

import pytest

from shim.patches._arguments import add_parameters, argument, by_name, replacing


def plain(a, b=2, c=3):
    return {"a": a, "b": b, "c": c}


def behind_any(a, *rest, b=2, c=3):
    return {"a": a, "rest": rest, "b": b, "c": c}


def by_name_only(a, *, b=2, **others):
    return {"a": a, "b": b, **others}


def in_front(a, b=2, *rest, c=3):
    return {"a": a, "b": b, "rest": rest, "c": c}


CALLS = [
    (plain, (1,), {}),
    (plain, (1, 5), {"c": 6}),
    (plain, (1, 5, 6), {}),
    (behind_any, (1,), {}),
    (behind_any, (1, 7, 8, 9), {}),
    (behind_any, (1, 7, 8, 9), {"b": 5, "c": 6}),
    (by_name_only, (1,), {"b": 5, "d": 4}),
    (in_front, (1, 5, 7, 8), {}),
    (in_front, (1, 5, 7, 8), {"c": 6}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_an_argument_is_read_and_replaced_as_the_function_gets_it(function, args, kwargs):
    got = function(*args, **kwargs)
    named = [parameter for parameter in inspect.signature(function).parameters if parameter in ("a", "b", "c")]
    for name in named:
        assert argument(function, name)(args, kwargs) == got[name]
        changed_args, changed_kwargs = replacing(function, name)(args, kwargs, "new")
        assert function(*changed_args, **changed_kwargs) == {**got, name: "new"}


def somebodys(*args, labels=None, **kwargs):
    return {"args": args, "labels": labels, **kwargs}


def test_a_keyword_of_somebodys_wrapper_is_no_place_among_its_arguments():
    """Such a wrapper takes a call of four arguments, none of which are its labels."""
    args = ("model", "ids", "positions", "mask")
    assert argument(somebodys, "labels")(args, {}) is None
    assert somebodys(*replacing(somebodys, "labels")(args, {}, 7)[0], labels=7) == somebodys(*args, labels=7)
    assert replacing(somebodys, "labels")(args, {}, 7) == (args, {"labels": 7})
    assert argument(somebodys, "b", like=plain)(args, {}) == "ids"


@pytest.mark.parametrize("name", ["rest", "others", "nothing"])
def test_what_is_no_single_argument_is_refused(name):
    for function in (behind_any, by_name_only):
        with pytest.raises(ValueError, match=f"{name} is no argument of"):
            argument(function, name)


def test_all_arguments_by_name_are_those_of_the_call():
    for function, args, kwargs in CALLS:
        if not any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
            given = by_name(function)(args, kwargs)
            assert function(**given) == function(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"), [(plain, (1, 2, 3, 4), {}), (plain, (1,), {"a": 1}), (by_name_only, (1, 2), {})]
)
def test_a_call_that_the_function_refuses_has_no_arguments_by_name(function, args, kwargs):
    with pytest.raises(TypeError):
        function(*args, **kwargs)
    with pytest.raises(TypeError, match=function.__name__):
        by_name(function)(args, kwargs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, "(a, b=2, c=3, later=None)"),
        (behind_any, "(a, *rest, b=2, c=3, later=None)"),
        (by_name_only, "(a, *, b=2, later=None, **others)"),
    ],
)
def test_a_later_parameter_stands_where_a_signature_may_have_it(function, expected):
    def wrapper(*args, **kwargs): ...

    add_parameters(wrapper, function, "a", "later")
    assert str(inspect.signature(wrapper)) == expected

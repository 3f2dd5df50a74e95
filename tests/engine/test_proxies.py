"""Wrappers of others that pass for what they wrap: they are told from upstream's own, named, and left alone."""

import functools
import logging

import pytest

import shim

CORE = "megatron.core."


class Delegating:
    """Lends everything of what it wraps, its class included, as proxies do."""

    def __init__(self, wrapped):
        object.__setattr__(self, "__wrapped__", wrapped)

    @property
    def __class__(self):
        return type(self.__wrapped__)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)

    def __call__(self, *args, **kwargs):
        return ("foreign", self.__wrapped__(*args, **kwargs))

    def __get__(self, instance, owner):
        return self

    def __eq__(self, other):
        return self.__wrapped__ == other

    def __hash__(self):
        return hash(self.__wrapped__)


class Calling:
    """An instance with __call__, and nothing else."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __call__(self, *args, **kwargs):
        return ("foreign", self.wrapped(*args, **kwargs))


def by_wrapt(original):
    wrapt = pytest.importorskip("wrapt")

    def foreign(wrapped, instance, args, kwargs):
        return ("foreign", wrapped(*args, **kwargs))

    return wrapt.FunctionWrapper(original, foreign)


def proxied(original):
    return pytest.importorskip("wrapt").ObjectProxy(original)


def partial(original):
    return functools.partial(lambda wrapped, *args: ("foreign", wrapped(*args)), original)


SORTS = [by_wrapt, proxied, Delegating, Calling, partial]
CACHED = """
    import functools


    @functools.lru_cache
    def cached(x):
        return x


    def kept(function):
        return functools.wraps(function)(lambda *args: function(*args))


    @kept
    def plain(x):
        return x
    """


BENEATH = [by_wrapt, Delegating, Calling]  # what they call is an attribute that can be written


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("target", ["ops:double", "layers:Layer.forward", "decorated:cached", "decorated:plain"])
def test_a_wrapper_of_another_sort(world, sort, target):
    """It stays. Where it can be written to, it calls ours; else the report says what it is, and what to do."""
    world.module("decorated", CACHED)
    world.patch("p", [CORE + target])
    if target.startswith("layers") and sort is Calling:
        pytest.skip("an instance is no method")
    before = world.get(target)
    foreign = sort(before)
    world.set(target, foreign)
    report = shim.apply()
    assert world.get(target) is foreign
    known = {by_wrapt: "FunctionWrapper with", proxied: "ObjectProxy", partial: "functools.partial with"}
    if sort in BENEATH:
        said = "".join(report["p"].others)
        assert (report["p"].state, report["p"].targets[CORE + target]) == ("applied", "called"), report["p"].reason
        if target == "ops:double":
            assert foreign(2) == ("foreign", ("p", 4))
    else:
        said = report["p"].reason
        assert report["p"].state == "conflict"
    assert known.get(sort, sort.__name__) in said
    assert ("test_proxies.py" in said) == (sort in (by_wrapt, partial))
    shim.revert()
    assert world.get(target) is foreign and getattr(foreign, "__wrapped__", before) is before
    if target == "ops:double" and sort is not proxied:
        assert foreign(2) == ("foreign", 4)


def test_upstreams_own_decorators_are_no_conflict(world):
    world.module("decorated", CACHED)
    world.patch("p", [CORE + "decorated:cached", CORE + "decorated:plain"])
    world.get("decorated:cached")
    assert shim.apply()["p"].state == "applied"


def test_a_foreign_function_around_a_decorated_one_is_known(world):
    """functools.wraps leads from it to upstream's body, which decorators of upstream's own do as well."""
    world.module("decorated", CACHED)
    world.patch("p", [CORE + "decorated:plain"])
    original = world.get("decorated:plain")
    world.set("decorated:plain", functools.wraps(original)(lambda x: ("foreign", original(x))))
    report = shim.apply()
    assert report["p"].state == "applied" and "test_proxies.py" in report["p"].others[0]
    assert world.get("decorated:plain")(3) == ("foreign", ("p", 3))
    world.set("decorated:plain", functools.wraps(original)(lambda x: "replaced"))
    report = shim.status()
    assert report["p"].state == "conflict" and "test_proxies.py" in report["p"].reason


@pytest.mark.parametrize("sort", SORTS)
def test_a_wrapper_on_top_of_ours_is_left_alone(world, sort, caplog):
    """A proxy of our wrapper equals it: it is no sign that our wrapper came back."""
    world.patch("p", [CORE + "ops:double"])
    world.get("ops:double")
    shim.apply()
    foreign = sort(world.get("ops:double"))
    world.set("ops:double", foreign)
    for change in (shim.revert, shim.apply, shim.revert, shim.apply):
        with caplog.at_level(logging.WARNING, "shim"):
            change()
        assert world.get("ops:double") is foreign
        # Into a partial shim cannot write: the function of shim's that it holds stays patched.
        bound = change is shim.apply or sort is partial
        assert sort is proxied or foreign(2) == ("foreign", ("p", 4) if bound else 4)
    assert shim.status()["p"].state == ("applied" if sort in BENEATH else "conflict")


def test_a_class_in_a_proxy_is_a_conflict(world):
    """Writing to it would write to the class."""
    world.patch("p", [CORE + "layers:Layer.forward"])
    original = world.get("layers:Layer")
    before = vars(original)["forward"]
    world.set("layers:Layer", proxied(original))
    assert shim.apply()["p"].state == "conflict"
    assert vars(original)["forward"] is before

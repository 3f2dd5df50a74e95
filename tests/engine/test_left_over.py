"""An object of shim's that is put on its name after revert() is inert, or status() names it and revert() takes it off.

Functions, methods and properties pass their calls on. A class, a callable object and a constant cannot.
"""

import random

import pytest
from thorough import times

import shim

MODULE = """
    import functools


    class Kind:
        def run(self, x):
            return x


    class Call:
        def __call__(self, x):
            return x


    thing = Call()
    TABLE = (1, 2)


    @functools.lru_cache
    def cached(x):
        return x


    def plain(x):
        return x


    class Own:
        @property
        def size(self):
            return 3

        @staticmethod
        def static(x):
            return x

        @classmethod
        def of_class(cls, x):
            return x
    """
FACTORY = """
    import functools


    def wrap(original):
        if isinstance(original, property):
            return property(wrap(original.fget))
        if isinstance(original, type):
            body = {"run": lambda self, x: (ID, original.run(self, x)), "__module__": original.__module__}
            return type(original.__name__, (original,), body)
        if not callable(original):
            return (ID, original)
        if type(original).__name__ in ("Call", "_lru_cache_wrapper"):
            class Around:
                def __call__(self, x):
                    return (ID, original(x))

            return Around()

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return (ID, original(*args, **kwargs))

        return wrapper


    def bindings(variant, options):
        return dict.fromkeys(TARGETS, wrap)
    """
INERT = ["plain", "Own.size", "Own.static", "Own.of_class"]
NAMED = ["Kind", "thing", "TABLE", "cached"]
USES = {
    "Kind": lambda kinds: kinds["Kind"]().run(2),
    "thing": lambda kinds: kinds["thing"](2),
    "TABLE": lambda kinds: kinds["TABLE"],
    "cached": lambda kinds: kinds["cached"](2),
    "plain": lambda kinds: kinds["plain"](2),
    "Own.size": lambda kinds: kinds["Own"]().size,
    "Own.static": lambda kinds: kinds["Own"].static(2),
    "Own.of_class": lambda kinds: kinds["Own"].of_class(2),
}


@pytest.fixture
def kinds(world):
    world.module("kinds", MODULE)
    for name in USES:
        world.patch(
            "p-" + name.replace(".", "-").replace("_", "-").lower() + str(len(name)),
            [f"megatron.core.kinds:{name}"],
            FACTORY,
        )
    world.get("kinds:plain")
    return world


def used(world):
    import sys

    return {name: use(vars(sys.modules["megatron.core.kinds"])) for name, use in USES.items()}


def test_what_is_put_back_is_inert_or_named(kinds):
    stock = used(kinds)
    upstream = {name: kinds.get(f"kinds:{name}") for name in USES}
    report = shim.apply()
    assert len(report.applied) == len(USES), str(report)
    saved = {name: kinds.get(f"kinds:{name}") for name in USES}
    assert [name for name in USES if used(kinds)[name] == stock[name]] == []
    shim.revert()
    for name, value in saved.items():
        kinds.set(f"kinds:{name}", value)
    now, lost = used(kinds), shim.status().lost
    for name in USES:
        told = any(f"megatron.core.kinds.{name} holds shim's object again" in text for text in lost)
        assert (now[name] == stock[name], told) == (name in INERT, name in NAMED), name
    assert not shim.revert().lost and used(kinds) == stock
    assert all(kinds.get(f"kinds:{name}") is upstream[name] for name in NAMED)


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(times(10, 200)))
def test_random_saves_and_returns_leave_nothing_bound_in_silence(kinds, seed):
    chance = random.Random(seed)
    stock, saved = used(kinds), []
    upstream = {name: kinds.get(f"kinds:{name}") for name in USES}
    on = False
    for _ in range(8):
        step, name = chance.choice(("apply", "revert", "save", "put", "put")), chance.choice(list(USES))
        if step == "apply":
            on = bool(shim.apply().applied)
        elif step == "revert":
            shim.revert()
            on = False
        elif step == "save":
            saved.append((name, kinds.get(f"kinds:{name}")))
        elif saved and not on:
            kinds.set(f"kinds:{saved[-1][0]}", saved.pop()[1])
        if not on:
            lost, now = shim.status().lost, used(kinds)
            for each in USES:
                assert now[each] == stock[each] or any(f"kinds.{each} holds shim's" in text for text in lost), each
    shim.revert()
    shim.revert()
    assert used(kinds) == stock
    assert all(kinds.get(f"kinds:{name}") is upstream[name] for name in NAMED)

"""Other people's patches: found below, left alone above, never taken back."""

import contextlib
import functools
import logging
import sys

import pytest
from fake_world import ALONE, same

import shim

CORE = "megatron.core."


def theirs(original):
    @functools.wraps(original)
    def foreign(*args, **kwargs):
        return ("foreign", original(*args, **kwargs))

    return foreign


def replacing(original):
    """Names upstream's function as its origin, and does not call it."""

    @functools.wraps(original)
    def foreign(*args, **kwargs):
        return "replaced"

    return foreign


def kind_of(raw, function):
    """`function` as the kind of attribute that `raw` is."""
    return type(raw)(function) if isinstance(raw, (property, staticmethod, classmethod)) else function


def function_in(raw):
    return getattr(raw, "fget", None) or getattr(raw, "__func__", raw)


@pytest.mark.parametrize("target", ["ops:double", "layers:Layer.forward", "layers:Layer.make", "layers:Layer.size"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_foreign_replacement_below_is_a_conflict(world, target, wrapped):
    """Nothing of a patch is bound where somebody else has replaced one of its targets; other patches are."""
    world.patch("p", [CORE + target, CORE + "other:other"])
    world.patch("q", [CORE + "ops:halve"])
    raw = world.get(target)
    foreign = kind_of(raw, replacing(function_in(raw)))
    if not wrapped:
        vars(function_in(foreign)).pop("__wrapped__", None)
    world.set(target, foreign)
    world.get("other:other"), world.get("users:double")
    before = world.snapshot()
    report = shim.apply()
    assert report["p"].state == "conflict"
    assert "foreign in " in report["p"].reason and "test_foreign.py" in report["p"].reason
    assert "exclude p" in report["p"].remedy
    assert report["q"].state == "applied"
    assert {place for place, _ in same(before, world.snapshot())} == {"ops:megatron.core.ops"}
    shim.revert()
    assert same(before, world.snapshot()) == []


@pytest.mark.parametrize("proxy", [functools.partial(print), object(), type("Proxy", (), {"__call__": print})()])
def test_a_foreign_proxy_is_a_conflict(world, proxy):
    """Where upstream's source has a plain function, a partial, a mock or a proxy is somebody else's."""
    world.patch("p", [CORE + "ops:double"])
    world.set("ops:double", proxy)
    assert shim.apply()["p"].state == "conflict"
    assert world.get("ops:double") is proxy


IMPORTS = {
    "absolute": "from megatron.core.ops import double",
    "renamed": "from megatron.core.ops import double as mine",
    "relative": "from .ops import double",
    "by_way_of": "from .users import twice",
    "guarded": """
        try:
            from .ops import double
        except ImportError:
            from megatron.core.ops import double
        """,
}


@pytest.mark.parametrize("way", IMPORTS)
@pytest.mark.parametrize("kind", [theirs, replacing])
def test_on_a_name_that_a_module_imports(world, way, kind):
    """What is defined elsewhere has its origin there."""
    module, name = world.module(way, IMPORTS[way]), {"renamed": "mine", "by_way_of": "twice"}.get(way, "double")
    place = f"{way}:{name}"
    world.patch("p", [(f"{module}:{name}", ALONE)])
    world.get(place), shim.apply()
    assert world.get(place)(2) == ("p", 4) and world.get("ops:double")(2) == 4
    shim.revert()
    foreign = kind(world.get(place))
    world.set(place, foreign)
    before = world.snapshot()
    assert shim.apply()["p"].state == ("applied" if kind is theirs else "conflict")
    assert world.get(place) is foreign
    assert world.get(place)(2) == (("foreign", ("p", 4)) if kind is theirs else "replaced")
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_a_foreign_object_on_what_a_class_inherits_is_a_conflict(world):
    """Of an inherited target the definition further up is looked at."""
    world.patch("p", [(CORE + "layers:Layer.tag", CORE + "layers:Base.tag")])
    world.set("layers:Base.tag", replacing(world.get("layers:Base.tag")))
    assert shim.apply()["p"].state == "conflict"


def test_a_decorated_original_is_not_foreign(world):
    """Upstream's own decorators are part of upstream's object, also when they leave no function."""
    world.module(
        "decorated",
        """
        import contextlib
        import functools


        def traced(function):
            @functools.wraps(function)
            def inner(*args):
                return function(*args)
            return inner


        @contextlib.contextmanager
        def region():
            yield


        @region()
        def three(x):
            return x


        @traced
        def one(x):
            return x


        @functools.lru_cache
        def two(x):
            return x
        """,
    )
    world.patch("p", [CORE + "decorated:one", CORE + "decorated:two", CORE + "decorated:three"])
    world.get("decorated:one")
    found = shim.apply()["p"]
    assert (found.state, found.others, set(found.targets.values())) == ("applied", (), {"bound"})
    assert world.get("decorated:two")(3) == world.get("decorated:three")(3) == ("p", 3)


def test_a_context_manager_of_others_is_not_upstreams_decorator(world):
    """contextlib makes both. The function beneath is patched inside, and what others put there stays."""

    @contextlib.contextmanager
    def region():
        yield

    world.patch("p", [CORE + "ops:double"])
    theirs = region()(world.get("ops:double"))
    world.set("ops:double", theirs)
    assert shim.apply()["p"].state == "applied"
    assert world.get("ops:double") is theirs
    assert theirs(3) == ("p", 6)


DECORATED = """
    import contextlib
    import functools


    @contextlib.contextmanager
    def region():
        yield


    def traced():
        def decorate(function):
            @functools.wraps(function)
            def inner(*args):
                return function(*args)
            return inner
        return decorate


    @{}()
    def three(x):
        return 3 * x
"""


@contextlib.contextmanager
def their_region():
    yield


@pytest.mark.parametrize("own", ["region", "traced"])
@pytest.mark.parametrize("around", ["theirs", "upstream's"])
@pytest.mark.parametrize("kind", [lambda original: original, replacing])
def test_a_decorator_around_a_function_that_upstream_decorates(world, own, around, kind):
    """contextlib makes upstream's wrapper and theirs. What they replaced is told, whoever's decorator is around it."""
    world.module("decorated", DECORATED.format(own))
    world.patch("p", [CORE + "decorated:three"])
    decorator = their_region if around == "theirs" else world.get(f"decorated:{own}")
    foreign = decorator()(kind(world.get("decorated:three")))
    world.set("decorated:three", foreign)
    found = shim.apply()["p"]
    if kind is replacing:
        assert (found.state, world.get("decorated:three")(2)) == ("conflict", "replaced"), found
        assert "test_foreign.py" in found.reason
    else:
        assert (found.state, world.get("decorated:three")(2)) == ("applied", ("p", 6)), found
        # shim goes beneath theirs, and around what is upstream's.
        assert (world.get("decorated:three") is foreign) is (around == "theirs")


@pytest.mark.parametrize("first", ["shim", "they"])
@pytest.mark.parametrize("on", [False, True])
def test_a_patch_that_is_switched_off_is_in_conflict_with_nobody(world, first, on):
    """Somebody else's object costs it nothing. Switched on, it is told."""
    world.patch("p", [CORE + "ops:double"], kind="feature", options={"fuse": "{default: false, switch: true}"})
    double = world.get("ops:double")
    if first == "shim":
        shim.apply(options={"p": {"fuse": on}})
    world.set("ops:double", replacing(double))
    if first == "they":
        shim.apply(options={"p": {"fuse": on}})
    found = shim.status()["p"]
    assert found.state == ("conflict" if on else "inactive"), str(found)
    assert "test_foreign.py" in found.reason and ("the option fuse is off" in found.reason) is not on


@pytest.mark.parametrize("place", ["ops:double", "users:twice", "users:Holder.call"])
def test_a_foreign_patch_on_top_is_left_alone(world, place, caplog):
    """Revert takes off what is ours, leaves what somebody put on top, and says so; apply and imports leave it too."""
    world.patch("p", [CORE + "ops:double", CORE + "other:other"])
    before = world.snapshot("ops", "users")
    shim.apply()
    foreign = replacing(world.get(place))
    world.set(place, foreign)
    on_target = place == "ops:double"
    assert shim.status()["p"].state == ("conflict" if on_target else "pending")
    assert any("was replaced by" in item and "test_foreign.py" in item for item in shim.status().lost)
    world.get("other:other")
    assert world.get(place) is foreign
    shim.apply(only=[])
    assert world.get(place) is foreign
    report = shim.revert()
    assert world.get(place) is foreign
    module, _, name = place.rpartition(":")[0], None, place.rpartition(".")[2].rpartition(":")[2]
    assert [k for _, k in same(before, world.snapshot("ops", "users"))] == [name], module
    assert any("test_foreign.py" in item for item in report.lost)
    assert any("left alone" in record.message for record in caplog.records if record.levelno == logging.WARNING)
    report = shim.apply()
    assert world.get(place) is foreign
    assert report["p"].state == ("conflict" if on_target else "applied")


@pytest.mark.parametrize("target", ["ops:double", "layers:Layer.make", "layers:Layer.tag"])
@pytest.mark.parametrize("reverted", [True, False])
def test_a_foreign_patch_that_was_removed_again(world, target, reverted):
    """Who takes his patch off puts our wrapper back: then apply works again, and revert gives upstream's object."""
    inherits = (CORE + target, CORE + "layers:Base.tag") if target.endswith("tag") else CORE + target
    world.patch("p", [inherits])
    world.patch("q", [inherits])
    before = world.snapshot()
    shim.apply()
    ours = world.get(target)
    world.set(target, lambda *args: None)
    if reverted:
        shim.revert()
    else:
        shim.apply(only=["p"])
    assert shim.status().lost
    world.set(target, ours)
    report = shim.apply()
    assert report.applied == ("p", "q"), report
    assert not report.lost
    call = world.get("layers:Layer")().tag if target.endswith("tag") else getattr(world.get(target), "__func__", None)
    call = call or world.get(target)
    assert call(*(() if target.endswith("tag") else (2,)))[0] == "q"
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_an_older_wrapper_that_came_back_on_an_alias_is_taken_off(world):
    """A revert takes off an older wrapper too that a foreign patch had saved and put back on an alias."""
    world.patch("p", [CORE + "ops:double"])
    world.patch("q", [CORE + "ops:double"])
    before = world.snapshot()
    shim.apply()
    older = world.get("users:twice")
    world.set("users:twice", lambda x: None)
    shim.apply(only=["p"])
    world.set("users:twice", older)
    shim.revert()
    assert same(before, world.snapshot()) == []


@pytest.mark.parametrize("taken", ["forward", "backward"])
def test_of_a_pair_both_stay_or_none(world, taken):
    """Where somebody stands on forward or backward, revert leaves both, because a pair torn apart computes wrong
    gradients; it takes both when he is gone."""
    world.patch("p", [CORE + "layers:Layer.forward", CORE + "layers:Layer.backward", CORE + "layers:Layer.make"])
    before = world.snapshot()
    shim.apply()
    ours = {name: world.get(f"layers:Layer.{name}") for name in ("forward", "backward")}
    foreign = functools.partial(ours[taken])  # which calls ours, and cannot be written to
    world.set(f"layers:Layer.{taken}", foreign)
    report = shim.revert()
    other = "backward" if taken == "forward" else "forward"
    assert world.get(f"layers:Layer.{other}") is ours[other]
    assert world.get(f"layers:Layer.{taken}") is foreign
    assert world.get("layers:Layer.make") is before["layers:Layer", "make"]
    assert any(f"stays bound, because {taken} was replaced" in item for item in report.lost)
    assert same(before, world.snapshot()) == [("layers:Layer", "backward"), ("layers:Layer", "forward")]
    shim.revert()
    assert world.get(f"layers:Layer.{other}") is ours[other]
    world.set(f"layers:Layer.{taken}", ours[taken])
    shim.revert()
    assert same(before, world.snapshot()) == []


@pytest.mark.parametrize("taken", ["forward", "backward"])
def test_of_a_pair_one_goes_where_the_other_was_replaced_for_good(world, taken):
    """A function that calls nothing of shim's was written for upstream's other half."""
    world.patch("p", [CORE + "layers:Layer.forward", CORE + "layers:Layer.backward"])
    before = world.snapshot()
    shim.apply()
    world.set(f"layers:Layer.{taken}", lambda self, x: None)
    shim.revert()
    other = "backward" if taken == "forward" else "forward"
    assert world.get(f"layers:Layer.{other}") is before["layers:Layer", other]


def test_a_second_apply_with_a_foreign_patch_on_top_changes_nothing(world):
    """Two frameworks may both call apply(): the patch of a third one above ours stays, and nothing comes off."""
    world.patch("p", [CORE + "ops:double", CORE + "layers:Layer.forward"])
    world.get("layers:Layer"), world.get("users:twice")
    shim.apply()
    world.set("ops:double", theirs(world.get("ops:double")))
    before = world.snapshot()
    shim.apply()
    assert same(before, world.snapshot()) == []


@pytest.mark.parametrize("way", ["status", "check", "plan"])
def test_a_conflict_ends_with_its_cause(world, way):
    """Where the foreign object is gone, the patch is applied, as apply() asked; nobody has to ask again."""
    world.patch("p", [CORE + "ops:double", CORE + "other:other"])
    world.patch("q", [CORE + "ops:halve"])
    upstream = world.get("ops:double")
    world.get("other:other")
    before = world.snapshot()
    foreign = replacing(upstream)
    world.set("ops:double", foreign)
    assert shim.apply()["p"].state == "conflict"
    assert shim.status()["p"].state == "conflict" and world.get("ops:double") is foreign
    world.set("ops:double", upstream)
    if way == "plan":
        assert shim.plan()["p"].action == "apply"
    report = shim.check() if way == "check" else shim.status()
    assert report["p"].state == "applied" and not report["p"].remedy
    assert world.get("ops:double")(2) == ("p", 4)
    shim.revert()
    assert same(before, world.snapshot()) == []


@pytest.mark.parametrize("asked_between", [False, True])
def test_a_foreign_object_on_top_that_is_gone_again_is_no_conflict(world, asked_between):
    """Whether shim has noticed it meanwhile or not."""
    world.patch("p", [CORE + "ops:double"])
    world.patch("q", [CORE + "other:other"])
    before = world.snapshot()
    shim.apply()
    ours = world.get("ops:double")
    world.set("ops:double", replacing(ours))
    assert shim.status()["p"].state == "conflict"
    if asked_between:
        shim.apply(only=["p"])
        assert shim.status()["p"].state == "conflict"
    world.set("ops:double", ours)
    report = shim.status()
    assert (report["p"].state, report.lost) == ("applied", ())
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_a_new_conflict_with_another_cause_is_told(world):
    """status() names who holds the target now, not who held it at apply()."""
    world.patch("p", [CORE + "ops:double"])
    upstream = world.get("ops:double")
    world.set("ops:double", replacing(upstream))
    shim.apply()
    world.set("ops:double", functools.partial(upstream))
    report = shim.status()
    assert report["p"].state == "conflict" and "partial" in report["p"].reason


def test_conflicts_are_looked_for_once(patched_world, monkeypatch):
    """Once for a plan that is adopted, and once for an import, also where factories are loaded for it."""
    from shim._engine import engine as _engine

    looked = []
    find = _engine.with_conflicts
    monkeypatch.setattr(_engine, "with_conflicts", lambda *given: looked.append(given) or find(*given))
    patched_world.get("ops:double")
    plan = shim.plan()
    looked.clear()
    _engine.ENGINE.switch_to(plan)
    assert len(looked) == 1
    patched_world.get("layers:Layer")
    assert len(looked) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="byte code has no qualified names yet, so that files are parsed")
def test_what_says_itself_that_it_is_upstreams_is_not_looked_up(patched_world, monkeypatch):
    """Parsing the files of targets would be most of the time of apply() where they are loaded already."""
    from shim._engine import foreign

    patched_world.get("layers:Layer"), patched_world.get("ops:double")
    parsed = []
    monkeypatch.setattr(foreign, "outline", lambda *given: parsed.append(given[1:]) or [])
    shim.apply()
    assert parsed == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="byte code has no qualified names yet, so that files are parsed")
def test_what_upstreams_own_decorator_wraps_is_not_looked_up(world, monkeypatch):
    """A file of 35 kB was parsed, and its tree kept, for one decorated method."""
    from shim._engine import foreign

    world.module(
        "wrapped",
        "import functools\n\n\ndef noted(function):\n    @functools.wraps(function)\n"
        "    def wrapper(*args):\n        return function(*args)\n\n    return wrapper\n\n\n"
        "@noted\ndef one(value):\n    return value\n\n\n@functools.lru_cache\ndef two(value):\n    return value\n",
    )
    world.patch("p", [CORE + "wrapped:one", CORE + "wrapped:two"])
    world.get("wrapped:one")
    parsed = []
    monkeypatch.setattr(foreign, "outline", lambda *given: parsed.append(given[1:]) or [])
    assert shim.apply()["p"].state == "applied"
    assert parsed == []

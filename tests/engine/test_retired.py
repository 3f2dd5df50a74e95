"""After revert() a function of shim's that somebody puts on a name again does what upstream's does."""

import functools
import gc
import inspect
import sys
import types

import pytest

import shim

CORE = "megatron.core."


class Manager:
    """Patches like MindSpeed's: keeps what it found on a name, and puts that back, on all names that hold its own."""

    def __init__(self):
        self.kept = []

    def wrap(self, owner, name):
        found = vars(owner)[name]
        inner = getattr(found, "__func__", found)

        @functools.wraps(inner)
        def theirs(*args, **kwargs):
            return inner(*args, **kwargs)

        new = type(found)(theirs) if isinstance(found, (staticmethod, classmethod)) else theirs
        self.kept.append((owner, name, found, new))
        setattr(owner, name, new)

    def replace(self, owner, name, new):
        self.kept.append((owner, name, vars(owner)[name], new))
        setattr(owner, name, new)

    def remove(self):
        for owner, name, found, _ in reversed(self.kept):
            setattr(owner, name, found)


TARGETS = [
    "megatron.core.ops:double",
    "megatron.core.layers:Layer.forward",
    "megatron.core.layers:Layer.make",
    "megatron.core.layers:Layer.build",
]


def results(world):
    layer = world.get("layers:Layer")
    return (
        world.get("ops:double")(3),
        world.get("ops:double")(3, scale=5),
        layer().forward(3),
        layer.make(3),
        layer.build(3),
    )


@pytest.fixture
def patched(world):
    """A patch on each kind of function, applied, and what stock gives."""
    world.patch("count", TARGETS)
    world.patch("more", TARGETS[:2])
    stock = results(world)
    shim.apply()
    assert results(world) != stock
    return world, stock


@pytest.mark.parametrize("how", ["wrap", "replace"])
def test_what_a_manager_puts_back_after_revert_does_what_upstreams_does(patched, how):
    """In the wrong order: shim, the manager, revert, and then the manager takes its own back."""
    world, stock = patched
    manager = Manager()
    for owner, name in (
        (sys.modules[CORE + "ops"], "double"),
        *((world.get("layers:Layer"), name) for name in ("forward", "make", "build")),
    ):
        manager.wrap(owner, name) if how == "wrap" else manager.replace(owner, name, lambda *args, **kwargs: None)
    shim.revert()
    manager.remove()
    assert results(world) == stock
    assert shim.status()["count"].state == "excluded"


def test_what_was_saved_and_put_back_does_what_upstreams_does(patched):
    world, stock = patched
    ops = sys.modules[CORE + "ops"]
    saved = ops.double
    shim.revert()
    upstream = ops.double
    ops.double = saved
    assert results(world) == stock
    assert inspect.signature(saved) == inspect.signature(upstream)
    assert shim.status()["count"].state == "excluded"
    with pytest.raises(TypeError):
        saved()
    with pytest.raises(TypeError):
        saved(1, 2, 3)
    # shim takes its own for upstream's there, and its patch holds again
    shim.apply()
    assert ops.double(3) == ("more", ("count", 6)) and shim.status()["count"].state == "applied"
    shim.revert()
    assert results(world) == stock and ops.double is upstream


def test_a_function_that_a_container_holds_does_what_upstreams_does(patched):
    """Where shim cannot write."""
    world, stock = patched
    table = {"double": world.get("ops:double")}
    bound = world.get("layers:Layer")().forward
    shim.revert()
    assert table["double"](3) == stock[0] and bound(3) == stock[2]


def test_a_patch_that_goes_alone_goes_from_what_was_saved_too(patched):
    """Where no other patch is left on the target."""
    world, stock = patched
    saved = world.get("layers:Layer").make
    shim.apply(exclude="count")
    assert saved(3) == stock[3]
    assert world.get("ops:double")(3) == ("more", 6)


def test_what_is_in_force_keeps_its_own_code(patched):
    """Applying again makes new functions, or gives those back their code that a factory returns once more."""
    world, _ = patched
    before = results(world)
    for _ in range(3):
        shim.revert()
        shim.apply()
        assert results(world) == before


AGAIN = """
    MADE = {}


    def wrap(original):
        def wrapper(x, scale=2, *, more=1):
            return (ID, original(x, scale) + more)

        wrapper.__signature__ = __import__("inspect").signature(original)
        return MADE.setdefault(original, wrapper)


    def bindings(variant, options):
        return dict.fromkeys(TARGETS, wrap)
    """


def test_a_function_that_a_factory_returns_again_is_in_force_again(world):
    world.patch("again", [TARGETS[0]], AGAIN)
    for _ in range(3):
        shim.apply()
        assert world.get("ops:double")(3) == ("again", 7) and world.get("ops:double")(3, 5, more=2) == ("again", 17)
        saved = world.get("ops:double")
        shim.revert()
        assert saved(3) == 6 and saved(3, scale=5) == 15


def test_a_property_that_is_put_back_does_what_upstreams_does(world):
    world.patch("sized", ["megatron.core.layers:Layer.size"])
    layer = world.get("layers:Layer")
    shim.apply()
    saved = vars(layer)["size"]
    assert layer().size == ("sized", 3)
    shim.revert()
    layer.size = saved
    assert layer().size == 3


def test_a_failed_apply_leaves_what_was_in_force_in_force(patched):
    world, _ = patched
    before = results(world)
    with pytest.raises(shim.ShimError):
        shim.apply(require=["nothing-of-that-name"])
    assert results(world) == before


def test_half_a_pair_that_stays_bound_stays_whole(world):
    """Where a foreign backward calls shim's, forward is left bound: with upstream's it would give wrong gradients."""
    world.patch("pair", ["megatron.core.layers:Layer.forward", "megatron.core.layers:Layer.backward"])
    layer = world.get("layers:Layer")
    shim.apply()
    ours, holder = vars(layer)["backward"], {}
    holder["backward"] = ours
    layer.backward = lambda self, x: holder["backward"](self, x)
    shim.revert()
    forward, backward = layer().forward(3), layer().backward(3)
    assert (forward, backward) in ((("pair", 4), ("pair", 2)), (4, 2))


def test_nothing_is_kept_alive(patched):
    import weakref

    world, _ = patched
    gone = weakref.ref(world.get("ops:double"))
    shim.revert()
    gc.collect()
    assert gone() is None


# A factory that finds nothing to do
AS_IT_IS = """
    def bindings(variant, options):
        return dict.fromkeys(TARGETS, lambda original: original)
    """


def test_a_function_that_a_factory_returns_as_it_got_it_stays_upstreams(world):
    """It is upstream's, and there is nothing beneath it: passed on to itself it would never return."""
    world.patch("idle", TARGETS, AS_IT_IS)
    stock = results(world)
    double = world.get("ops:double")
    code = double.__code__
    shim.apply()
    shim.revert()
    assert world.get("ops:double") is double and double.__code__ is code
    assert results(world) == stock


# A patch that is off while somebody's object stands on a target


def test_a_patch_that_comes_back_has_its_aliases_again(world):
    """The name held shim's older function, and the alias upstream's: a search for the older one alone misses it."""
    world.patch("count", ["megatron.core.ops:double"])
    world.get("ops:double")
    ops = sys.modules[CORE + "ops"]
    alias = types.ModuleType("somebodys_module")
    sys.modules[alias.__name__] = alias
    try:
        alias.double = ops.double
        shim.apply()
        ours = ops.double
        assert alias.double(3) == ("count", 6)
        ops.double = lambda *args, **kwargs: None
        assert shim.status()["count"].state == "conflict" and alias.double(3) == 6
        ops.double = ours
        assert shim.status()["count"].state == "applied"
        assert ops.double(3) == alias.double(3) == ("count", 6)
    finally:
        del sys.modules[alias.__name__]

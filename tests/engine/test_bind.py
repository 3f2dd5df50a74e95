"""What a binding reaches, and that a revert gives it back."""

import functools
import inspect
import pickle
import types

import pytest
from fake_world import ALONE, DOUBLE, same
from thorough import times

import shim

CORE = "megatron.core."


@pytest.mark.parametrize(
    ("target", "inherits", "kind", "places"),
    [
        ("ops:double", None, types.FunctionType, DOUBLE),
        ("ops:LIMIT", None, int, [("ops:megatron.core.ops", "LIMIT")]),
        ("layers:Layer.forward", None, types.FunctionType, [("layers:Layer", "forward")]),
        ("layers:Layer.make", None, staticmethod, [("layers:Layer", "make")]),
        ("layers:Layer.build", None, classmethod, [("layers:Layer", "build")]),
        ("layers:Layer.size", None, property, [("layers:Layer", "size")]),
        ("layers:Layer.tag", "layers:Base.tag", types.FunctionType, [("layers:Layer", "tag")]),
        ("layers:Child.make", "layers:Layer.make", staticmethod, [("layers:Child", "make")]),
        ("layers:Child.build", "layers:Layer.build", classmethod, [("layers:Child", "build")]),
        ("layers:Child.size", "layers:Layer.size", property, [("layers:Child", "size")]),
        ("layers:Layer", None, type, [("layers:megatron.core.layers", "Layer")]),
    ],
)
def test_every_kind_of_target_is_bound_and_given_back(world, target, inherits, kind, places):
    """A function, constant, method, staticmethod, classmethod, property, inherited attribute and class can be targets.

    What stands there is of the same kind, at all its places and at no other; revert leaves the identical object, or
    nothing if there was nothing.
    """
    source = """
        import functools


        def wrap(original):
            if isinstance(original, type):
                return type(original)(original.__name__, (original,), {"__module__": original.__module__})
            if isinstance(original, property):
                return property(wrap(original.fget))
            if not callable(original):
                return original + 1

            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                return ("patched", original(*args, **kwargs))

            return wrapper


        def bindings(variant, options):
            return dict.fromkeys(TARGETS, wrap)
        """
    full = CORE + target
    world.patch("p", [full if inherits is None else (full, CORE + inherits)], source)
    before = world.snapshot()
    report = shim.apply()
    assert report["p"].state == "applied", report
    of_the_new_class = [place for place in before if target == "layers:Layer" and place[0] == "layers:Layer"]
    assert same(before, world.snapshot()) == sorted([*places, *of_the_new_class])
    assert type(world.get(target)) is kind
    layer, child = world.get("layers:Layer")(), world.get("layers:Child")()
    calls = {
        "ops:double": lambda: world.get("ops:double")(2),
        "ops:LIMIT": lambda: ("patched", 4) if world.get("ops:LIMIT") == 11 else None,
        "layers:Layer.forward": lambda: layer.forward(3),
        "layers:Layer.make": lambda: (layer.make(4), type(layer).make(4))[0],
        "layers:Layer.build": lambda: (layer.build(0)[0], 4),
        "layers:Layer.size": lambda: (layer.size[0], 4),
        "layers:Layer.tag": lambda: (layer.tag()[0], 4),
        "layers:Child.make": lambda: (child.make(4), type(child).make(4))[0],
        "layers:Child.build": lambda: (child.build(0)[0], 4),
        "layers:Child.size": lambda: (child.size[0], 4),
        "layers:Layer": lambda: ("patched", 4) if len(type(layer).__mro__) == 4 else None,
    }
    assert calls[target]() == ("patched", 4)
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_an_inherited_attribute_leaves_the_base_class_alone(world):
    """Binding an inherited attribute shadows it on the subclass only; revert deletes the shadow, it does not set it."""
    world.patch("p", [(CORE + "layers:Layer.tag", CORE + "layers:Base.tag")])
    base = world.get("layers:Base.tag")
    shim.apply()
    assert world.get("layers:Base.tag") is base
    assert world.get("layers:Layer")().tag() == ("p", "base")
    assert world.get("layers:Base")().tag() == "base"
    shim.revert()
    assert world.get("layers:Layer.tag") == "missing"


def test_a_patch_of_the_base_and_one_of_what_a_subclass_inherits(world):
    """Two patches, one on a base method and one on the name a subclass inherits, do not hide each other's base."""
    world.patch("a", [CORE + "layers:Base.tag"])
    world.patch("b", [(CORE + "layers:Layer.tag", CORE + "layers:Base.tag")])
    before = world.snapshot()
    shim.apply(only=["a"])
    report = shim.apply()
    assert report["b"].state == "applied", report
    assert world.get("layers:Base")().tag() == ("a", "base")
    assert world.get("layers:Layer")().tag() == ("b", "base")
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_aliases_are_rebound(world):
    """Names that other modules and class bodies took earlier follow, also under another name."""
    world.patch("p", [CORE + "ops:double"])
    before = world.snapshot()
    shim.apply()
    users = world.get("users:Holder")
    for place in ("users:double", "users:twice", "users:Holder.call"):
        assert world.get(place) is world.get("ops:double")
    assert users.run(2) == ("p", 4)
    assert type(vars(users)["run"]) is staticmethod
    assert type(vars(users)["make"]) is classmethod
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_aliases_in_classes_of_derived_metaclasses_are_rebound(world):
    """Whatever the kind of the class, and however far its metaclass is from `type`."""
    source = """
        from megatron.core.ops import double


        class Meta(type):
            pass


        class Derived(Meta):
            pass


        class Holder(metaclass=Derived):
            call = double
        """
    world.module("derived", source)
    world.patch("p", [CORE + "ops:double"])
    before = world.snapshot("ops", "derived")
    shim.apply()
    assert world.get("derived:Holder.call")(2) == ("p", 4)
    shim.revert()
    assert same(before, world.snapshot("ops", "derived")) == []


def test_aliases_taken_while_bound_are_given_back(world):
    """A module imported after apply() holds upstream's own function after revert()."""
    world.patch("p", [CORE + "ops:double"])
    world.get("ops:double")
    original = world.get("ops:double")
    shim.apply()
    assert world.get("users:twice")(2) == ("p", 4)
    shim.revert()
    assert world.get("users:twice") is original
    assert world.get("users:Holder.call") is original
    assert world.get("users:Holder.run").__func__ is original


def test_a_target_defined_elsewhere_reaches_earlier_aliases(world):
    """Where a target is a name its module only imported, names that others took of the same object follow too."""
    world.module("front", "from megatron.core.ops import double\n")
    world.patch("p", [CORE + "front:double"])
    world.get("ops:double"), world.get("users:double")
    before = world.snapshot()
    shim.apply()
    world.get("front:double")
    assert shim.status()["p"].state == "applied"
    assert world.get("users:double")(2) == ("p", 4)
    assert world.get("ops:double")(2) == ("p", 4)
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_a_replacement_that_lives_elsewhere_keeps_its_own_places(world):
    """A factory may return a function of another module; revert takes it off the target, not out of its home."""
    source = """
        def bindings(variant, options):
            def factory(original):
                from megatron.core.other import twin
                return twin
            return dict.fromkeys(TARGETS, factory)
        """
    world.module("other", "def twin(x, scale=2):\n    return x * scale\n")
    world.patch("p", [CORE + "ops:double"], source)
    before = world.snapshot()
    shim.apply()
    assert world.get("users:twice") is world.get("other:twin")
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_two_patches_share_a_target(world):
    """The chain of a target follows the matrix's order however the patches come and go."""
    world.patch("a", [CORE + "ops:double", CORE + "ops:halve"])
    world.patch("b", [CORE + "ops:double"])
    before = world.snapshot()
    expected = {(): 4, ("a",): ("a", 4), ("b",): ("b", 4), ("a", "b"): ("b", ("a", 4))}
    for wanted in [("a", "b"), ("a",), ("a", "b"), ("b",), ("b",), (), ("b",), ("a", "b"), ("a",), (), ("a", "b")]:
        report = shim.apply(only=wanted)
        assert report.applied == wanted
        for place in ("ops:double", "users:double", "users:twice", "users:Holder.call"):
            assert world.get(place)(2) == expected[wanted]
    shim.revert()
    assert same(before, world.snapshot()) == []


def test_a_bound_function_shows_upstreams_face(patched_world):
    """inspect.signature, the functools.wraps data and pickling by name are those of the original."""
    original = patched_world.get("ops:double")
    shim.apply()
    wrapper = patched_world.get("ops:double")
    assert wrapper is not original
    assert inspect.signature(wrapper) == inspect.signature(original)
    for name in functools.WRAPPER_ASSIGNMENTS:
        assert getattr(wrapper, name, None) == getattr(original, name, None)
    assert wrapper.__wrapped__ is original
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    assert pickle.loads(pickle.dumps(patched_world.get("layers:Layer")().forward)).__func__ is patched_world.get(
        "layers:Layer.forward"
    )


def test_a_backport_may_add_optional_parameters(world):
    """A parameter of a later release may come in behind upstream's, with a default."""
    source = """
        def bindings(variant, options):
            def factory(original):
                def double(x, scale=2, added=None):
                    return original(x, scale), added
                return double
            return dict.fromkeys(TARGETS, factory)
        """
    world.patch("p", [CORE + "ops:double"], source)
    world.get("ops:double")
    shim.apply()
    assert world.get("ops:double")(2, added=1) == (4, 1)


def test_one_frame_per_patch(world):
    """A call of a target with two patches runs two frames more than upstream's, and none of the engine's."""
    import sys

    world.patch("a", [CORE + "ops:double"])
    world.patch("b", [CORE + "ops:double"])
    world.get("ops:double")
    shim.apply()
    files = []
    function = world.get("ops:double")
    sys.setprofile(lambda frame, event, argument: event == "call" and files.append(frame.f_code.co_filename))
    try:
        function(2)
    finally:
        sys.setprofile(None)
    assert [name.rpartition("/")[2] for name in files] == ["b.py", "a.py", "ops.py"]


def test_one_pass_over_the_modules(world, monkeypatch):
    """apply() looks through sys.modules at most twice, however many patches there are."""
    from shim._engine import transactions as binding

    for number in range(6):
        world.patch(f"p{number}", [CORE + f"ops:{'double' if number % 2 else 'halve'}"])
    world.get("ops:double")
    passes = []

    def counting(objects, modules=None):
        passes.append(modules)
        return find_aliases(objects, modules)

    find_aliases = binding.find_aliases
    monkeypatch.setattr(binding, "find_aliases", counting)
    shim.apply()
    assert 1 <= passes.count(None) <= 2


@pytest.mark.no_cover
@pytest.mark.growth
def test_cycles_leave_nothing_behind(patched_world):
    """Hundreds of times apply and revert grow nothing that the engine keeps."""
    from shim._engine.engine import ENGINE

    before = patched_world.snapshot()
    plan = shim.plan()
    sizes = []
    for _ in range(times(100, 300)):
        ENGINE.switch_to(plan)
        ENGINE.switch_to(None)
        binder = ENGINE.binder
        kept = [binder.slots, binder.replaced, binder.chains, binder.ours]
        kept += [ENGINE.factories._made, ENGINE.failed, ENGINE.deferred.logged]
        sizes.append([len(item) for item in kept])
    assert sizes[5] == sizes[-1]
    assert same(before, patched_world.snapshot()) == []


def test_what_is_another_modules_is_bound_under_this_name_alone(world):
    """Upstream has put its own general function under a target's name: that function stays what it is elsewhere."""
    world.module("chosen", "from megatron.core.ops import double as impl\n")
    world.patch("p", [(CORE + "chosen:impl", ALONE)])
    original = world.get("ops:double")
    assert world.get("chosen:impl") is original
    shim.apply()
    assert world.get("chosen:impl")(2) == ("p", 4)
    assert world.get("ops:double") is original is world.get("users:double")
    shim.revert()
    assert world.get("chosen:impl") is original


def test_patches_nest_in_the_order_of_the_matrix(world):
    """The first in the file is innermost, whatever was applied before and whichever module was imported first."""
    for id in ("z", "m", "a"):
        world.patch(id, [CORE + "ops:double"])
    world.get("ops:double")
    nested = ("a", ("m", ("z", 4)))
    shim.apply(only=["a"])
    shim.apply(only=["a", "z"])
    shim.apply(only="a,m,z")
    assert world.get("ops:double")(2) == nested
    shim.revert()
    shim.apply(only=["m"])
    assert shim.apply().applied == ("z", "m", "a")
    assert world.get("ops:double")(2) == nested

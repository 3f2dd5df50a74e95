"""An override of a patched method counts by its effect: it calls the method, was tried, was marked, or is unknown."""

import functools
import sys
import types

import pytest
from fake_world import Model

import shim


@pytest.fixture
def layer(patched_world):
    """The class with the patched forward, which returns a tuple that begins with "count"."""
    found = patched_world.get("layers:Layer")
    patched_world.get("ops:double")
    patched_world.stock = vars(found)["forward"]
    shim.apply()
    return found


def found_with(instance):
    """The report of the patch, as check() and status() give it."""
    model = Model(instance)
    checked = shim.check(model)["count"]
    assert shim.status()["count"] == checked
    return checked


def state_with(instance):
    return found_with(instance).state


def test_an_override_that_calls_the_patched_method_hides_nothing(layer):
    """The remedy that a shadowed patch names: by super(), by the class, in a nested function, or as a wrapper."""
    base = layer

    class BySuper(layer):
        def forward(self, x):
            return super().forward(x)

    class ByName(layer):
        def forward(self, x):
            return (lambda: base.forward(self, x))()

    class Above(BySuper):
        def forward(self, x):
            return super().forward(x)

    wrapped = layer()
    patched = wrapped.forward
    wrapped.forward = lambda x: patched(x)
    for instance in (BySuper(), ByName(), Above(), wrapped):
        assert instance.forward(1)[0] == "count"
        assert state_with(instance) == "applied"


def test_an_override_that_calls_something_else_is_tried(patched_world, layer):
    """It hides the patch, or its effect is unknown if trying it fails."""
    stock = patched_world.stock

    class Another(layer):
        def forward(self, x):
            return super().tag(), x

    class Above(Another):
        def forward(self, x):
            return super().forward(x)

    class Fails(layer):
        def forward(self, x):
            return self.inner.forward(x)

    earlier = layer()
    earlier.forward = lambda x: stock(earlier, x)
    for instance in (Another(), Above(), earlier):
        assert state_with(instance) == "shadowed"
    found = found_with(Fails())
    assert found.state == "unknown"
    where = f"test_overrides.py:{Fails.forward.__code__.co_firstlineno}"
    for word in ("Fails", where, "overrides forward without calling it", "AttributeError", "'inner'"):
        assert word in found.reason
    assert "shim.compatible" in found.remedy


def test_an_override_that_does_the_same_by_itself_hides_nothing(layer):
    class Own(layer):
        def forward(self, x):
            return "count", x

    found = found_with(Own())
    assert found.state == "applied"
    (told,) = found.others
    assert "Own" in told and "loses nothing" in told


def test_an_override_without_a_text_is_read_by_its_code(layer):
    names = {}
    exec("def forward(self, x):\n    return base.forward(self, x)\n", {"base": layer}, names)
    found = found_with(type("WithoutText", (layer,), names)())
    assert found.state == "applied" and "WithoutText" in found.others[0] and "and calls it" in found.others[0]


def test_what_functools_wraps_names_is_not_called(layer):
    """Nor is what an annotation or an assignment names: only what the code reads counts."""
    base = layer

    class Own(layer):
        @functools.wraps(base.forward)
        def forward(self, x: "base.forward"):
            self.forward_kept = base
            return "something else", x

    assert state_with(Own()) == "shadowed"


def test_others_tells_who_stands_above_and_calls(layer):
    class Bridge(layer):
        def forward(self, x):
            return super().forward(x)

    (told,) = found_with(Bridge()).others
    assert f"Bridge ({__file__}:{Bridge.forward.__code__.co_firstlineno}) overrides forward and calls it" in told
    assert found_with(layer()).others == ()


def test_an_override_of_the_release_itself_is_not_told_of(patched_world, layer):
    """Others are those who have patched or derived from a release."""
    names = {"Layer": layer, "__name__": "megatron.core.heirs"}
    exec("class Heir(Layer):\n    def forward(self, x):\n        return 'count', x\n", names)
    found = found_with(names["Heir"]())
    assert found.state == "applied" and not found.others


def test_what_shim_binds_in_a_subclass_overrides_nothing(world):
    """One patch on a method of a class and of its subclass, whose own method calls nothing of the base's."""
    world.patch("both", ["megatron.core.layers:Base.forward", "megatron.core.layers:Layer.forward"])
    layer = world.get("layers:Layer")
    shim.apply()
    found = shim.check(Model(layer()))["both"]
    assert found.state == "applied" and not found.others

    class Hides(layer):
        def forward(self, x):
            return x

    assert "Hides" in shim.check(Model(Hides()))["both"].reason


def test_what_another_patch_binds_in_a_subclass_is_not_taken_for_a_users(world):
    """What lies beneath it counts: here the release's own method, which calls nothing."""
    world.patch("both", ["megatron.core.layers:Base.forward"])
    world.patch("above", ["megatron.core.layers:Layer.forward"])
    layer, base = world.get("layers:Layer"), world.get("layers:Base")
    shim.apply()
    told = shim.check(Model(layer()))["both"]
    assert told.state == "shadowed" and "layers.py" in told.reason and "fake_patches" not in told.reason
    assert shim.check(Model(base()))["both"].state == "applied"


def test_methods_bound_to_an_instance_are_read_as_methods_of_a_class(layer):
    """As trainers bind them, with and without the method that was there before."""

    def calls_what_was_there(self, x):
        return self.forward_backup(x)

    def hides(self, x):
        return x

    kept, hidden = layer(), layer()
    kept.forward_backup, hidden.forward_backup = kept.forward, hidden.forward
    kept.forward, hidden.forward = types.MethodType(calls_what_was_there, kept), hides.__get__(hidden)
    assert kept.forward(1)[0] == "count" and state_with(kept) == "applied"
    assert "holds another forward" in found_with(kept).others[0]
    found = found_with(hidden)
    assert found.state == "shadowed" and f"test_overrides.py:{hides.__code__.co_firstlineno}" in found.reason


def test_each_override_is_tried_once_at_a_check(patched_world, layer):
    """However many layers have it. status() tries nothing, and what the override calls may change between checks."""
    module, tried = sys.modules["fake_patches.count"], []
    module.probe = lambda *given: tried.append(given) or True

    class Own(layer):
        def forward(self, x):
            return x

    model = Model(*[Own() for _ in range(80)])
    for _ in range(3):
        shim.check(model)
        shim.status()
    assert [method for _, method, _ in tried] == ["megatron.core.layers:Layer.forward"] * 3
    model.inner[3].config = types.SimpleNamespace(recompute=True)
    shim.check(model)
    assert len(tried) == 5


def test_an_override_is_tried_also_where_the_patch_can_do_without_its_target(patched_world):
    """Without the target is one thing, and an override that does something else in its place is another."""
    text = patched_world.matrix.read_text()
    spared = "{target: megatron.core.layers:Layer.forward, without: layers do not count}"
    patched_world.matrix.write_text(text.replace("- megatron.core.layers:Layer.forward", f"- {spared}"))
    base = patched_world.get("layers:Layer")
    patched_world.get("ops:double")
    shim.apply()

    class Own(base):
        def forward(self, x):
            return x

    assert state_with(Own()) == "shadowed"


# Doubt


@pytest.fixture
def doubtful(layer):
    """A model with an override of which the patch knows nothing."""
    sys.modules["fake_patches.count"].probe = lambda *given: "it needs a GPU to say so"

    class Own(layer):
        def forward(self, x):
            return x

    return Model(Own())


def test_doubt_is_a_warning_once_and_never_an_error(doubtful, caplog):
    shim.apply(require=["count"], strict=True)
    for _ in range(2):
        found = shim.check(doubtful)["count"]
        assert found.state == "unknown" and "needs a GPU to say so" in found.reason
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "is unknown: " in said[0] and "shim.compatible" in said[0]


def test_a_patch_that_fixes_nothing_warns_of_no_doubt(patched_world, doubtful, caplog):
    """Without a performance patch the model trains right, too."""
    patched_world.patch("count", patched_world.patches["count"]["targets"], kind="performance")
    shim.apply()
    shim.check(doubtful)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_other_ranks_warn_in_one_short_line(doubtful, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    shim.check(doubtful)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("count (unknown): ") and len(said) <= 160 and "Remedy" not in said


# Functions that models reach through methods

REACHED = """
    def step(x):
        return x + 1


    def through(x):
        return step(x)


    class Block:
        def forward(self, x):
            return step(x)
    """


@pytest.fixture
def block(world):
    world.module("block", REACHED)
    methods = "{target: megatron.core.block:step, reached_by: [megatron.core.block:Block.forward]}"
    world.patch("count", ["megatron.core.block:step"])
    world.matrix.write_text(world.matrix.read_text().replace("- megatron.core.block:step", f"- {methods}"))
    found = world.get("block:Block")
    shim.apply()
    return found


def test_an_override_of_a_method_that_reaches_the_patched_function(block):
    module = sys.modules["megatron.core.block"]
    step = module.step

    class BySuper(block):
        def forward(self, x):
            return super().forward(x)

    class ByName(block):
        def forward(self, x):
            return step(x)

    class ByModule(block):
        def forward(self, x):
            return module.step(x)

    class ByImport(block):
        def forward(self, x):
            from megatron.core.block import step as one

            return one(x)

    class ByHelper(block):
        def forward(self, x):
            return module.through(x)

    class Own(block):
        def forward(self, x):
            return x + 1

    for cls in (BySuper, ByName, ByModule, ByImport, ByHelper):
        found = found_with(cls())
        assert cls().forward(1) == ("count", 2) and found.state == "applied"
        assert cls.__name__ in found.others[0]
    found = found_with(Own())
    assert (
        found.state == "shadowed"
        and found.targets == {"megatron.core.block:step": "shadowed"}
        and "overrides forward" in found.reason
    )


# The mark

FORWARD = "megatron.core.layers:Layer.forward"


def test_a_marked_override_is_trusted(layer):
    """Without being tried: this one would be found to hide the patch. A class method and a wrapper carry it, too."""

    def passing_on(function):
        return functools.wraps(function)(lambda *args: function(*args))

    class Marked(layer):
        @shim.compatible(FORWARD, version="0.1.0")
        def forward(self, x):
            return x

    class Wrapped(layer):
        @passing_on
        @shim.compatible(FORWARD, version="0.1.0")
        def forward(self, x):
            return x

    bound = layer()
    bound.forward = types.MethodType(Marked.forward, bound)
    for instance in (Marked(), Wrapped(), bound):
        found = found_with(instance)
        assert found.state == "applied"
        (told,) = found.others
        assert f"says that it keeps {FORWARD}, as of shim 0.1.0" in told and "test_overrides.py:" in told


def test_a_mark_of_another_target_says_nothing_of_this_one(layer):
    class Marked(layer):
        @shim.compatible("megatron.core.layers:Layer.backward")
        def forward(self, x):
            return x

    assert state_with(Marked()) == "shadowed"

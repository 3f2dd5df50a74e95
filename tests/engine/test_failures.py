"""A patch that fails leaves nothing behind, and nobody can overlook it."""

import importlib
import sys

import pytest
from fake_world import DOUBLE, same

import shim
from shim._engine import names

CORE = "megatron.core."

RAISES = """
    def bindings(variant, options):
        def factory(original):
            raise KeyError("no luck")
        good = lambda original: lambda *args, **kwargs: original(*args, **kwargs)
        import functools
        def fine(original):
            return functools.wraps(original)(good(original))
        return {t: fine if t != TARGETS[-1] else factory for t in TARGETS}
    """


def failing(body):
    return RAISES.replace('raise KeyError("no luck")', body)


BAD = {
    "raises": RAISES,
    "too few parameters": failing("return lambda x: x"),
    "hidden by functools.wraps": failing("return functools.wraps(original)(lambda: None)"),
    "argument not taken by name": failing("return functools.wraps(original)(lambda x, factor=2: None)"),
    "needs more": failing("return functools.wraps(original)(lambda x, scale, more: None)"),
    "returns nothing": failing("return None"),
    "a proxy": failing("return functools.partial(original)"),
    "a descriptor": failing("return staticmethod(original)"),
    "a class": failing("return int"),
    "does not import": "raise RuntimeError('broken')",
    "no bindings": "",
    "other targets": "def bindings(variant, options):\n    return {}\n",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_a_failing_patch_fails_the_import_each_time(world, source):
    """The import of a target raises BindError each time, past ``except ImportError``; the module leaves sys.modules
    and its parent, and what the patch had bound in other modules is taken off. Other patches stay."""
    world.module(
        "guarded",
        """
        try:
            from megatron.core.ops import double
        except ImportError:
            double = None
        """,
    )
    world.patch("bad", [CORE + "layers:Layer.forward", CORE + "ops:double"], source)
    world.patch("good", [CORE + "layers:Layer.backward", CORE + "ops:halve"])
    before = world.snapshot("layers")
    early = source.strip().startswith("raise") or "functools" not in source
    if early:
        with pytest.raises(shim.BindError):
            shim.apply()
        assert shim.status()["good"].state == "excluded"
        assert same(before, world.snapshot("layers")) == []
        del sys.modules[CORE + "layers"], sys.modules["megatron.core"].layers
    report = shim.apply()
    for _ in range(3):
        with pytest.raises(shim.BindError, match="bad") as raised:
            importlib.import_module(CORE + "guarded")
        assert "MEGATRON_SHIM_EXCLUDE=bad" in str(raised.value)
        assert "9.9.0" in str(raised.value)
        assert CORE + "ops" not in sys.modules
        assert CORE + "guarded" not in sys.modules
        assert not hasattr(sys.modules["megatron.core"], "ops")
        report = shim.status()
        assert report["bad"].state == "failed"
        assert report["good"].state == "pending"
        if not early:
            assert world.get("layers:Layer.forward") is before["layers:Layer", "forward"]
            assert world.get("layers:Layer.backward") is not before["layers:Layer", "backward"]
    shim.apply(exclude=["bad"])
    assert world.get("ops:halve")(2) == ("good", 1)
    shim.revert()
    if not early:
        assert same(before, world.snapshot("layers")) == []


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_an_apply_that_raises_changes_nothing(world, source):
    """apply() that raises leaves the plan, the bindings, sys.meta_path and the aliases of before."""
    world.patch("bad", [CORE + "layers:Layer.forward", CORE + "ops:double"], source)
    world.patch("good", [CORE + "layers:Layer.backward", CORE + "ops:halve"])
    world.snapshot()
    for before_apply in (lambda: None, lambda: shim.apply(only=["good"])):
        before_apply()
        before, meta_path = world.snapshot(), list(sys.meta_path)
        with pytest.raises(shim.BindError, match="bad"):
            shim.apply()
        assert same(before, world.snapshot()) == []
        assert sys.meta_path == meta_path
    assert shim.status().applied == ("good",)


def test_options_that_fail_leave_the_options_before(world):
    """Where apply() fails with other options, the patch goes on as it was before with the old ones."""
    source = """
        import functools

        def bindings(variant, options):
            def factory(original):
                if options["mode"] == "bad":
                    raise ValueError("bad mode")
                @functools.wraps(original)
                def wrapper(*args, **kwargs):
                    return (options["mode"], original(*args, **kwargs))
                return wrapper
            return dict.fromkeys(TARGETS, factory)
        """
    world.patch("p", [CORE + "ops:double"], source, options={"mode": "plain"})
    world.get("ops:double")
    shim.apply()
    assert world.get("ops:double")(2) == ("plain", 4)
    shim.apply(options={"p": {"mode": "other"}})
    assert world.get("ops:double")(2) == ("other", 4)
    with pytest.raises(shim.BindError, match="bad mode"):
        shim.apply(options={"p": {"mode": "bad"}})
    assert shim.status()["p"].state == "applied"
    assert world.get("ops:double")(2) == ("other", 4)


@pytest.mark.parametrize("how", ["ignores", "raises"])
def test_a_write_that_does_not_read_back_rolls_back(world, how):
    """Where a class does not take a write, the patch fails as a whole and other patches are untouched."""
    body = "pass" if how == "ignores" else "raise AttributeError(name)"
    world.module(
        "stubborn",
        f"""
        class Meta(type):
            def __setattr__(cls, name, value):
                {body}


        class Stubborn(metaclass=Meta):
            def run(self):
                return 1
        """,
    )
    world.patch("bad", [CORE + "ops:double", CORE + "stubborn:Stubborn.run"])
    world.patch("worse", [CORE + "stubborn:Stubborn.run"])
    world.patch("good", [CORE + "ops:halve"])
    before = world.snapshot("ops", "users")
    shim.apply()
    for _ in range(2):
        with pytest.raises(shim.BindError, match=r"worse|bad"):
            importlib.import_module(CORE + "stubborn")
        assert shim.status()["bad"].state == "failed"
        assert shim.status()["worse"].state == "failed"
        assert shim.status()["good"].state == "applied"
        assert world.get("ops:double") is before["ops:megatron.core.ops", "double"]
        assert world.get("users:twice") is before["ops:megatron.core.ops", "double"]
    shim.revert()
    assert same(before, world.snapshot("ops", "users")) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_between_two_writes_leaves_nothing(world, monkeypatch, when):
    """KeyboardInterrupt at each write, just before it or just after it, leaves all as it was."""
    world.patch("p", [CORE + "ops:double", (CORE + "layers:Layer.tag", CORE + "layers:Base.tag")])
    before = world.snapshot()
    write, left = names._write, [0]

    def interrupted(owner, name, value):
        left[0] -= 1
        if left[0] == -1 and when == "before":
            raise KeyboardInterrupt
        write(owner, name, value)
        if left[0] == -1:
            raise KeyboardInterrupt

    monkeypatch.setattr(names, "_write", interrupted)
    for writes in range(50):
        left[0] = writes
        try:
            shim.apply()
        except KeyboardInterrupt:
            assert same(before, world.snapshot()) == [], writes
            assert shim.status().applied == (), writes
        else:
            break
    tag = ("layers:Layer", "tag")
    assert same(before, world.snapshot()) == [tag, *DOUBLE]
    assert writes >= len([tag, *DOUBLE])


def test_an_interrupt_inside_a_factory_leaves_nothing(world):
    """KeyboardInterrupt while a factory runs leaves nothing half applied, at apply() and at an import."""
    world.patch("p", [CORE + "ops:double", CORE + "layers:Layer.forward"], failing("raise KeyboardInterrupt"))
    before = world.snapshot()
    with pytest.raises(KeyboardInterrupt):
        shim.apply()
    assert same(before, world.snapshot()) == []
    del sys.modules[CORE + "layers"]
    before = world.snapshot("ops", "users")
    shim.apply()
    assert same(before, world.snapshot("ops", "users")) == DOUBLE
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(CORE + "layers")
    assert CORE + "layers" not in sys.modules
    assert shim.status()["p"].state == "pending"
    shim.revert()
    assert same(before, world.snapshot("ops", "users")) == []


def test_a_circular_importer_of_a_failing_module_gets_upstreams_object_back(world):
    """A module that took an alias while the failing module was still being imported is rolled back with it."""
    world.module("first", "def f(x):\n    return x\n\n\nimport megatron.core.second\n\n\ndef g(x):\n    return x\n")
    world.module("second", "from megatron.core.first import f\n")
    world.patch("good", [CORE + "first:f"])
    world.patch("bad", [CORE + "first:g"], RAISES)
    shim.apply()
    with pytest.raises(shim.BindError):
        importlib.import_module(CORE + "first")
    assert CORE + "first" not in sys.modules
    assert sys.modules[CORE + "second"].f(1) == 1
    assert not shim._engine.engine.ENGINE.binder.slots
    shim.apply(exclude=["bad"])
    assert world.get("first:f")(1) == ("good", 1)


def test_a_patch_module_may_import_another_target(world):
    """A patch module that imports a further target at its top is bound there too, and so are aliases taken then."""
    source = """
        import functools

        from megatron.core.layers import Layer
        from megatron.core.other import other as taken


        def bindings(variant, options):
            def factory(original):
                return functools.wraps(original)(lambda *args, **kwargs: ("p", original(*args, **kwargs)))
            return dict.fromkeys(TARGETS, factory)
        """
    world.patch("p", [CORE + "ops:double", CORE + "layers:Layer.forward", CORE + "other:other"], source)
    shim.apply()
    assert world.get("ops:double")(2) == ("p", 4)
    assert shim.status()["p"].state == "applied"
    assert world.get("layers:Layer")().forward(1) == ("p", 2)
    assert sys.modules["fake_patches.p"].taken is world.get("other:other")

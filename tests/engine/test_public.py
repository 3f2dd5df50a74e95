"""The public functions: what they say, raise and adjust to."""

import gc
import logging
import pickle
import sys

import pytest
from fake_world import same

import shim

CORE = "megatron.core."


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def drifted(world):
    """A world where the body of one patch is unknown, and another patch is fine."""
    world.patch("gone", [CORE + "ops:double"], pins={CORE + "ops:double": "0" * 16 + ".00000000"})
    world.patch("fine", [CORE + "ops:halve"])
    return world


def test_apply_is_idempotent_and_adjusts(patched_world):
    """A second apply() changes no object; one with other arguments adds and removes what they say."""
    patched_world.patch("more", [CORE + "other:other"])
    before = patched_world.snapshot()
    shim.apply()
    bound = patched_world.snapshot()
    assert shim.apply().applied == ("count", "more")
    assert same(bound, patched_world.snapshot()) == []
    assert shim.apply(exclude=["count"]).applied == ("more",)
    assert patched_world.get("ops:double") is before["ops:megatron.core.ops", "double"]
    assert shim.apply(only="count").applied == ("count",)
    assert shim.revert().applied == ()
    assert same(before, patched_world.snapshot()) == []
    assert shim.revert().applied == ()


def test_a_report_travels_without_its_plan(patched_world):
    """To another process, as Ray sends it; copies and pickles say the same and compare by the digest, too."""
    report = shim.apply()
    sent = pickle.loads(pickle.dumps(report))
    assert sent == report and sent.to_dict() == report.to_dict() and sent.text() == report.text()
    assert type(sent.plan) is not type(report.plan) and report != shim.apply(exclude=["count"])


def test_patched_nests_and_restores(patched_world):
    """Leaving a with-block restores what was applied before it, also after an exception, at every depth."""
    patched_world.patch("more", [CORE + "ops:double"])
    before = patched_world.snapshot()
    double = lambda: patched_world.get("users:twice")(2)  # noqa: E731
    with shim.patched(only=["count"]) as report:
        assert report.applied == ("count",)
        assert double() == ("count", 4)
        with pytest.raises(ZeroDivisionError), shim.patched():
            assert double() == ("more", ("count", 4))
            with shim.patched(only=["more"]):
                assert double() == ("more", 4)
            assert double() == ("more", ("count", 4))
            raise ZeroDivisionError
        assert double() == ("count", 4)
    assert same(before, patched_world.snapshot()) == []
    assert shim.status()["count"].state == "excluded"


def test_plan_changes_nothing(patched_world):
    """plan() imports no target and no patch, and leaves sys.meta_path alone."""
    before = set(sys.modules)
    assert shim.plan()["count"].action == "apply"
    added = set(sys.modules) - before
    assert not [name for name in added if name.startswith(("megatron", "fake_patches", "torch"))]


def test_drift_is_a_warning_with_reason_and_remedy_once(drifted, caplog):
    """A correctness patch that has drifted is warned about once, with why and what to do; others apply."""
    drifted.get("ops:double")
    report = shim.apply()
    shim.apply()
    shim.status()
    [text] = warnings_in(caplog)
    assert "gone is not applied (drifted)" in text and "Remedy:" in text and "9.9.0" in text
    assert report["gone"].state == "drifted"
    assert report.applied == ("fine",)


def test_all_patches_that_have_drifted_are_one_warning(drifted, caplog):
    """On a fork there may be dozens, and one command decides them all. A rank other than 0 gets a short line."""
    for number in range(9):
        drifted.patch(f"also-gone-{number}", [CORE + "ops:double"], pins={CORE + "ops:double": "0" * 16 + ".00000000"})
    shim.apply()
    shim.status()
    [text] = warnings_in(caplog)
    assert text.startswith("10 patches are not applied (drifted): gone, also-gone-0, ") and len(text) < 700
    assert "Remedy: let the proofs decide, in some minutes: shim pin --prove --lock FILE; or " in text
    assert text.count("Remedy") == 1


def test_a_conflict_is_a_warning_with_reason_and_remedy_once(patched_world, caplog):
    """A conflict is warned about once, and names the file of whoever holds the target."""
    patched_world.set("ops:double", lambda x: x)
    shim.apply()
    shim.apply()
    [text] = warnings_in(caplog)
    assert "count is not applied (conflict)" in text and "test_public.py" in text and "Remedy:" in text


@pytest.mark.parametrize("arguments", [{"require": ["gone"]}, {"strict": True}, {"on_drift": "error"}])
def test_a_drifted_patch_that_is_needed_raises_and_nothing_is_applied(drifted, arguments):
    """Under require, strict or on_drift="error" apply() raises NotMetError before it changes anything."""
    before, meta_path, modules = drifted.snapshot(), list(sys.meta_path), set(sys.modules)
    with pytest.raises(shim.NotMetError, match="gone"):
        shim.apply(**arguments)
    assert same(before, drifted.snapshot()) == []
    assert sys.meta_path == meta_path
    assert not [name for name in set(sys.modules) - modules if name.startswith(("megatron", "fake_patches"))]
    assert shim.status().applied == ()


@pytest.mark.parametrize("arguments", [{"require": ["count"]}, {"strict": True}])
def test_a_conflict_that_matters_raises_and_nothing_is_applied(patched_world, arguments):
    """Under require or strict a foreign object on a target raises NotMetError, and nothing is bound."""
    patched_world.patch("more", [CORE + "other:other"])
    patched_world.set("ops:double", lambda x: x)
    before = patched_world.snapshot()
    with pytest.raises(shim.NotMetError, match="count"):
        shim.apply(**arguments)
    assert same(before, patched_world.snapshot()) == []


def test_require_is_enforced_at_the_import(world):
    """A required patch whose target turns out foreign when it is imported makes that import raise, each time; what it
    had bound elsewhere is taken off."""
    world.module("taken", "def f(x):\n    return x\n\n\nimport megatron.core.other as o\nf = o.other\n")
    world.patch("p", [CORE + "taken:f", CORE + "ops:double"])
    # Only the first definition is known to the source as a function.
    path = world.root / "megatron" / "core" / "taken.py"
    path.write_text("def f(x):\n    return x\n\n\nimport megatron.core.other as o\nglobals()['f'] = o.other\n")
    world.write()
    original = world.get("ops:double")
    shim.apply(require=["p"])
    for _ in range(2):
        with pytest.raises(shim.NotMetError, match="conflict"):
            world.get("taken:f")
        assert CORE + "taken" not in sys.modules
    assert world.get("ops:double") is original


def test_what_is_not_needed_any_more_is_known_by_name(patched_world):
    """After a revert status() still speaks of the patches that were applied, also with a matrix of the caller's."""
    import os

    matrix = os.environ.pop("MEGATRON_SHIM_MATRIX")
    shim.apply(matrix=matrix)
    assert shim.revert()["count"].state == "excluded"
    assert "count" in shim.status().patches
    os.environ["MEGATRON_SHIM_MATRIX"] = matrix


def test_check_before_apply_is_an_error(patched_world):
    """check() where nothing was applied raises OptionError, because it could only say that nothing is wrong."""
    with pytest.raises(shim.OptionError, match="apply"):
        shim.check()


def test_check_says_one_line_on_rank_zero_only(patched_world, caplog, monkeypatch):
    """check() logs one INFO line where RANK is 0 or unset, and none elsewhere."""
    patched_world.snapshot()
    shim.apply()
    for rank, lines in ((None, 1), ("0", 1), ("3", 0)):
        caplog.clear()
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        with caplog.at_level(logging.INFO, "shim"):
            shim.check()
        assert len([record for record in caplog.records if record.levelno == logging.INFO]) == lines
    assert warnings_in(caplog) == []


def test_check_names_what_is_pending(patched_world, caplog):
    """A wanted patch whose target nobody has imported is a warning, and NotMetError where it is required."""
    patched_world.get("ops:double")
    shim.apply()
    assert shim.check()["count"].state == "pending"
    assert "megatron.core.layers" in warnings_in(caplog)[0]
    shim.apply(require=["count"])
    with pytest.raises(shim.NotMetError, match="pending"):
        shim.check()


def test_check_is_silent_about_modules_that_a_process_may_do_without(world, caplog):
    """The patch still says that it waits, and a trainer that requires it hears of it."""
    world.patch("count", [{"target": "megatron.core.layers:Layer.forward", "optional": True}])
    shim.apply()
    found = shim.check()["count"]
    assert found.state == "idle" and found.reason.startswith("waits for megatron.core.layers, which")
    assert warnings_in(caplog) == [] and "nothing needs you" not in shim.check().text(pending_is_amiss=True)
    shim.apply(require=["count"])
    with pytest.raises(shim.NotMetError, match=r"is idle: waits for megatron\.core\.layers"):
        shim.check()
    world.get("layers:Layer")
    assert shim.check()["count"].state == "applied"


class FakeModel:
    """As much of a torch.nn.Module as check() asks for."""

    def __init__(self, *modules):
        self.inner = modules

    def modules(self):
        return iter(self.inner)


def test_check_names_overriding_classes_and_instances(patched_world):
    """A subclass that overrides a patched method, or an instance that holds one of its own, makes it shadowed."""
    layers = patched_world.get("layers:Layer")
    shim.apply()
    patched_world.get("users:Holder")

    class Mine(layers):
        def forward(self, x):
            return x

    odd = layers()
    assert shim.check(FakeModel(layers(), patched_world.get("layers:Child")()))["count"].state == "applied"
    odd.forward = layers.forward.__get__(odd)
    assert shim.check([FakeModel(odd)])["count"].state == "applied"
    odd.forward = lambda x: x
    for instance, words in ((Mine(), ("Mine", "overrides forward")), (odd, ("Layer", "holds another forward"))):
        report = shim.check([FakeModel(layers()), FakeModel(instance)])
        assert report["count"].state == "shadowed"
        assert all(word in report["count"].reason for word in words)
        assert ".py" in report["count"].reason
        assert report["count"].targets[CORE + "layers:Layer.forward"] == "shadowed"
    shim.apply(require=["count"])
    with pytest.raises(shim.NotMetError, match="shadowed"):
        shim.check(FakeModel(Mine()))


HOLDS = """
    import functools, weakref

    HELD = []


    class Buffer:
        pass


    def wrap(original, buffer):
        return functools.wraps(original)(lambda *args, **kwargs: (buffer, original(*args, **kwargs)))


    def bindings(variant, options):
        buffer = Buffer()
        HELD.append(weakref.ref(buffer))
        return {target: functools.partial(wrap, buffer=buffer) for target in TARGETS}
    """


def test_what_a_patch_holds_ends_with_it(world):
    """Buffers in the closures of its functions, too; another patch that is applied or taken off is nothing to it."""
    world.patch("holds", [CORE + "ops:double"], HOLDS)
    world.patch("other", [CORE + "ops:halve"])
    world.get("ops:double")
    shim.apply()
    (held,) = sys.modules["fake_patches.holds"].HELD
    shim.apply(exclude=["other"])
    shim.apply()
    gc.collect()
    assert world.get("ops:double")(2)[0] is held()
    shim.revert()
    gc.collect()
    assert held() is None


def test_a_feature_that_nobody_switched_on_is_no_warning(world, caplog):
    """Its state says so, and where it is required it is an error."""

    class Model:
        def modules(self):
            return [self]

    world.patch("wish", [CORE + "ops:double"], kind="feature")
    world.get("ops:double")
    shim.apply()
    sys.modules["fake_patches.wish"].problems = lambda models: [("the flag is off", "switch it on")]
    assert shim.check(Model())["wish"].state == "inactive"
    assert warnings_in(caplog) == []
    shim.apply(require=["wish"])
    with pytest.raises(shim.NotMetError, match="the flag is off"):
        shim.check(Model())

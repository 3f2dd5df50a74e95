"""Random histories of applies, reverts, imports and foreign patches end where they should."""

import contextlib
import functools
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from fake_world import World, fresh_engine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupting import ACTS, acting, holds_in_a_fork
from thorough import times

import shim
from shim._engine import engine

CORE = "megatron.core."
IDS = ("a", "b", "c", "d")
# Places that shim may write, with the module that makes the original.
PLACES = (
    "ops:double",
    "ops:halve",
    "layers:Layer.forward",
    "layers:Layer.backward",
    "layers:Layer.make",
    "layers:Layer.tag",
    "users:double",
    "users:twice",
    "users:Holder.call",
    "users:Holder.run",
    "late:mine",
)
MODULES = ("ops", "layers", "users", "other", "late")


def raw(place):
    module, _, qualname = place.partition(":")
    owner = sys.modules[CORE + module]
    *path, name = qualname.split(".")
    for part in path:
        owner = vars(owner)[part]
    return owner, name, vars(owner).get(name, "missing")


def put(place, value):
    owner, name, _ = raw(place)
    if isinstance(value, str):
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def files_called(value):
    """The files of the functions that a call runs, from the outside in."""
    files, inner = [], getattr(value, "__func__", value)
    while inner is not None:
        files.append(inner.__code__.co_filename.rpartition("/")[2])
        assert len(files) < 50, f"functions call each other in a circle: {files[:9]}"
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        held = cells.get("inner") or cells.get("original")  # of a foreign function, and of shim's
        inner = None if held is None else held.cell_contents
        inner = getattr(inner, "__func__", inner)
    return files


def is_replacement(value):
    return getattr(value, "__func__", value).__code__.co_name == "replaced"


class Histories(RuleBasedStateMachine):
    """`foreign` maps a place to a stack of (what was there, what was put there)."""

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.foreign: dict[str, list] = {}
        self.originals: dict[str, object] = {}
        self.pinned_double = {0: True}  # edition of ops -> whether its `double` is the one that is pinned

    @initialize()
    def begin(self):
        monkeypatch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.stack.enter_context(fresh_engine(monkeypatch))
        root = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.world = World(root, monkeypatch)
        self.world.module("late", "from megatron.core.ops import double as mine\n")
        tag = (CORE + "layers:Layer.tag", CORE + "layers:Base.tag")
        self.world.patch("a", [CORE + "ops:double", CORE + "layers:Layer.forward", CORE + "layers:Layer.backward"])
        self.world.patch("b", [CORE + "ops:double", CORE + "layers:Layer.make"])
        self.world.patch("c", [CORE + "ops:halve", tag])
        self.world.patch("d", [CORE + "layers:Layer.make", tag, CORE + "layers:Layer.forward"])
        self.other = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.meta_path = list(sys.meta_path)
        monkeypatch.setattr(sys, "path", list(sys.path))

    def loaded(self):
        return [place for place in PLACES if CORE + place.partition(":")[0] in sys.modules]

    def note(self):
        for place in self.loaded():
            if place not in self.originals:
                value = raw(place)[2]
                inner = getattr(value, "__func__", value)
                while hasattr(inner, "__wrapped__"):
                    inner = inner.__wrapped__
                module = place.partition(":")[0]
                if place == "layers:Layer.tag":
                    inner = "missing"
                self.originals[place] = inner
                assert isinstance(inner, str) or inner.__code__.co_filename.endswith(
                    ("ops.py" if module in ("users", "late") else f"{module}.py",)
                )

    @rule(name=st.sampled_from(MODULES))
    def load(self, name):
        # What a module takes from beneath somebody else's patch is his, and out of reach.
        if name in ("users", "late") and "ops:double" in self.foreign:
            return
        if not (self.world.root / "megatron").is_dir():
            self.come()  # the path comes late
        is_new = CORE + name not in sys.modules
        self.world.get(f"{name}:__name__")
        self.note()
        plan = engine.ENGINE.plan
        for decision in () if plan is None or self.foreign or not is_new else plan.decisions.values():
            for target in decision.targets if decision.wanted else ():
                if target.startswith(f"{CORE}{name}:"):
                    called = files_called(raw(target.removeprefix(CORE))[2])
                    assert f"{decision.id}.py" in called, f"{target} calls {called} after its import"

    def come(self):
        (self.world.root / "gone").rename(self.world.root / "megatron")
        importlib.invalidate_caches()

    @rule(
        at=st.integers(1, 900),
        only=st.one_of(st.none(), st.sets(st.sampled_from(IDS))),
        act=st.sampled_from(sorted(ACTS)),
    )
    def act_within(self, at, only, act):
        """An interrupt, or a signal handler that calls shim, at any place of an apply() or revert()."""
        with acting(at, ACTS[act]):
            shim.revert() if only is None else shim.apply(only=sorted(only))

    @rule()
    def fork(self):
        if hasattr(os, "fork"):
            assert holds_in_a_fork(self.read_back, shim.apply, self.read_back, shim.revert, self.read_back)

    @precondition(lambda self: self.loaded())
    @rule(data=st.data(), calls=st.sampled_from([True, True, False]))
    def foreign_set(self, data, calls):
        place = data.draw(st.sampled_from(self.loaded()))
        value = raw(place)[2]
        inner = getattr(value, "__func__", value)

        def theirs(*args, **kwargs):
            return ("foreign", inner(*args, **kwargs))

        def replaced(*args, **kwargs):
            return "replaced"

        new = theirs if calls and callable(inner) else replaced
        new = functools.wraps(inner)(new) if callable(inner) else new
        new = type(value)(new) if isinstance(value, staticmethod) else new
        put(place, new)
        self.foreign.setdefault(place, []).append((value, new))

    @precondition(lambda self: self.foreign)
    @rule(data=st.data())
    def foreign_unset(self, data):
        place = data.draw(st.sampled_from(sorted(self.foreign)))
        assert raw(place)[2] is self.foreign[place][-1][1], "what somebody else put there was taken away"
        value, _ = self.foreign[place].pop()
        if not self.foreign[place]:
            del self.foreign[place]
        put(place, value)

    @invariant()
    def foreign_objects_are_left_alone(self):
        for place, stack in self.foreign.items():
            assert raw(place)[2] is stack[-1][1], f"{place}: what somebody else put there was taken away"

    @invariant()
    def read_back(self):
        """status() says "applied" only where every target leads to a wrapper of that patch right now.

        And it says "conflict" only where somebody's object does not call what it replaced.
        """
        if not hasattr(self, "world"):
            return
        report = shim.status()
        ran = getattr(sys.modules.get(CORE + "ops"), "EDITION", 0)
        for id in report:
            if id in ("a", "b") and "all" in report[id].reason and "are known" in report[id].reason:
                there = CORE + "ops" not in sys.modules or self.pinned_double[ran]
                assert there, f"{id} is {report[id].state}: {report[id].reason}, but edition {ran} ran"
        for id in report.applied:
            for target in report[id].targets:
                if target.partition(":")[0] not in sys.modules:
                    continue  # bound in a module that has left sys.modules, and that somebody may hold
                value = raw(target.removeprefix(CORE))[2]
                layers = files_called(value)
                assert f"{id}.py" in layers, f"{id} is called applied, but {target} calls {layers}"
        for id in report:
            if report[id].state == "conflict":
                on = [new for stack in self.foreign.values() for _, new in stack]
                assert any(map(is_replacement, on)), f"{id}: {report[id].reason}"

    def teardown(self):
        try:
            if hasattr(self, "world"):
                self.foreign_objects_are_left_alone()
                shim.revert()
                self.foreign_objects_are_left_alone()
                for place in list(self.foreign):
                    while place in self.foreign:
                        value, _ = self.foreign[place].pop()
                        put(place, value)
                        if not self.foreign[place]:
                            del self.foreign[place]
                shim.revert()
                assert not shim.status().lost
                for place in self.loaded():
                    value = raw(place)[2]
                    assert getattr(value, "__func__", value) is self.originals[place] or value == "missing", place
                    assert (value == "missing") == (self.originals[place] == "missing"), place
                assert not shim._engine.engine.ENGINE.binder.slots
        finally:
            self.stack.close()


class Files(Histories):
    """Paths come late, files are edited, other releases come and go, and somebody takes the hook away."""

    foreign_set = foreign_unset = None  # histories with these have imported everything before anything happens to files

    @precondition(lambda self: CORE[:-1] not in sys.modules and (self.world.root / "megatron").is_dir())
    @rule()
    def tree_goes(self):
        (self.world.root / "megatron").rename(self.world.root / "gone")
        importlib.invalidate_caches()

    @precondition(lambda self: (self.world.root / "megatron").is_dir() and CORE + "ops" not in sys.modules)
    @rule(body=st.booleans(), load=st.sampled_from(MODULES))
    def edit(self, body, load):
        """Somebody edits the file of `ops`, its `double` or something beside it, before the import of a module."""
        file = self.world.root / "megatron" / "core" / "ops.py"
        text = file.read_text()
        edition = len(self.pinned_double)
        if body:
            old, new = ("x * scale", "scale * x") if "x * scale" in text else ("scale * x", "x * scale")
            text = text.replace(old, new)
        self.pinned_double[edition] = "x * scale" in text
        file.write_text(text.partition("EDITION")[0] + f"EDITION = {edition}\n")
        self.load(load)

    @precondition(lambda self: CORE[:-1] not in sys.modules)
    @rule(load=st.sampled_from(MODULES))
    def another_release_comes_first_or_goes(self, load):
        if str(self.other) in sys.path:
            sys.path.remove(str(self.other))
            self.load(load)
            return
        if not (self.other / "megatron").is_dir():
            tree = next(at for name in ("megatron", "gone") if (at := self.world.root / name).is_dir())
            shutil.copytree(tree, self.other / "megatron")
            file = self.other / "megatron" / "core" / "ops.py"
            file.write_text(
                file.read_text().replace("x * scale", "x * 1 * scale").partition("EDITION")[0] + "EDITION = -1\n"
            )
            self.pinned_double[-1] = False
        sys.path = [str(self.other), *sys.path]
        self.load(load)

    @rule(load=st.sampled_from(MODULES))
    def restore_meta_path(self, load):
        sys.meta_path[:] = self.meta_path
        self.load(load)

    @rule(only=st.sets(st.sampled_from(IDS)))
    def apply(self, only):
        shim.apply(only=sorted(only))

    @rule()
    def apply_all(self):
        shim.apply()

    @rule()
    def revert(self):
        shim.revert()

    @rule(only=st.sets(st.sampled_from(IDS)), nested=st.sets(st.sampled_from(IDS)), load=st.sampled_from(MODULES))
    def patched(self, only, nested, load):
        with shim.patched(only=sorted(only)):
            with shim.patched(only=sorted(nested)):
                self.load(load)
            self.read_back()

    @precondition(lambda self: CORE[:-1] in sys.modules)
    @rule(everything=st.booleans())
    def forget_and_apply(self, everything):
        """The modules leave sys.modules, so that everything is imported anew."""
        shim.apply(only=IDS if everything else ["a"])
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        self.originals.clear()


TestFiles = pytest.mark.no_cover(Files.TestCase)
TestHistories = pytest.mark.no_cover(Histories.TestCase)
TestFiles.settings = TestHistories.settings = settings(
    max_examples=times(6, 50),
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to look into a failure
    suppress_health_check=list(HealthCheck),
)

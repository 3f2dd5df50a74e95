"""What stands on a target is upstream's because shim has seen that it is, and never because it stands there.

Random histories in which somebody replaces an alias and the target, and takes both back in any order, between shim's
looks at them.
"""

import contextlib
import functools
import importlib
import random
import sys

import pytest
from fake_world import World, fresh_engine
from thorough import times

import shim

CORE = "megatron.core."
TARGET = "ops:double"
ALIASES = ("users:double", "users:twice", "users:Holder.call", "users:Holder.run")
LOOKS = ("status", "check", "apply", "apply one", "revert", "import")


def calls_it(inner):
    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        return ("foreign", inner(*args, **kwargs))

    return theirs


def replaces_it(inner):
    @functools.wraps(inner)
    def replaced(*args, **kwargs):
        return "replaced"

    return replaced


def hides_it(inner):
    """A function that shim cannot get beneath: what it calls lies in a list."""
    table = [inner]

    def hiding(x, scale=2):
        return ("foreign", table[0](x, scale))

    return hiding


def is_no_function(inner):
    return functools.partial(inner)


KINDS = (calls_it, replaces_it, hides_it, is_no_function)


def layers_of(value):
    """What a call of `value` runs, from the outside in: "shim", "foreign" or "upstream"."""
    found, inner = [], getattr(value, "__func__", value)
    while inner is not None:
        assert len(found) < 50, f"functions call each other in a circle: {found[:9]}"
        if isinstance(inner, functools.partial):
            found.append("foreign")
            inner = inner.func
            continue
        file = inner.__code__.co_filename.rpartition("/")[2]
        of = {"test_aliases_given_back.py": "foreign", "ops.py": "upstream"}.get(file, "shim")
        found.append(of)
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        cell = cells.get("inner") or cells.get("original") or cells.get("table")
        inner = None if cell is None else cell.cell_contents
        inner = inner[0] if isinstance(inner, list) else getattr(inner, "__func__", inner)
    return found


class History:
    """One history in a world. `put` maps a place to a stack of (what was there, what somebody has put there)."""

    def __init__(self, world, chance, wraps=False):
        self.world, self.chance, self.wraps = world, chance, wraps
        self.put: dict[str, list] = {}
        self.steps: list[str] = []
        self.applied = False
        self.reloaded = False

    def run(self, steps):
        self.world.get("users:double"), self.world.get(TARGET)
        self.before = {place: self.world.get(place) for place in (TARGET, *ALIASES)}
        for _ in range(steps):
            self.step()
            self.look_at_what_stands()
        self.end()

    def step(self):
        name = self.chance.choice(("put alias", "put target", "take", "take", "take", "reload", *LOOKS, "status"))
        if name == "reload" and self.chance.random() < 0.7:
            name = "status"
        if name.startswith("put"):
            place = TARGET if name == "put target" else self.chance.choice(ALIASES)
            kind = self.chance.choice(KINDS)
            self.steps.append(f"{kind.__name__} on {place}")
            found = self.world.get(place)
            new = kind(getattr(found, "__func__", found))
            new = staticmethod(new) if isinstance(found, staticmethod) else new
            self.put.setdefault(place, []).append((found, new))
            self.world.set(place, new)
        elif name == "take":
            if self.put:
                self.take(self.chance.choice(sorted(self.put)))
        elif name == "reload":
            # Whoever has patched the module that runs anew has nothing to take back there.
            self.steps.append("reload")
            self.put.pop(TARGET, None)
            self.reloaded = True
            importlib.reload(sys.modules[CORE + "ops"])
        else:
            self.look(name)

    def take(self, place):
        self.steps.append(f"take back {place}")
        found, new = self.put[place].pop()
        assert self.stands(place, new), "what somebody has put there was taken away"
        if not self.put[place]:
            del self.put[place]
        self.world.set(place, found)

    def stands(self, place, new):
        """Whether somebody's object stands on a name, or, if the patch goes around such an object, beneath shim's."""
        value = self.world.get(place)
        return value is new or (self.wraps and place == TARGET and "foreign" in layers_of(value))

    def look(self, name):
        self.steps.append(name)
        if name == "status":
            shim.status()
        elif name == "check":
            if self.applied:
                shim.check()
        elif name == "import":
            sys.modules.pop(CORE + "other", None)
            importlib.import_module(CORE + "other")
        elif name == "revert":
            self.take_what_holds_shims()
            self.applied = False
            shim.revert()
        else:
            self.applied = True
            shim.apply(only=["p"] if name == "apply one" else None)

    def take_what_holds_shims(self):
        """A function of shim's that is put back after revert() stays patched: docs/limits.md."""
        for place in sorted(self.put):
            while any("shim" in layers_of(found) for found, _ in self.put.get(place, ())):
                self.take(place)

    def look_at_what_stands(self):
        for place, stack in self.put.items():
            assert self.stands(place, stack[-1][1]), f"{place}: what somebody has put there was taken away"
        report = shim.status()
        layers = layers_of(self.world.get(TARGET))
        if "p" in report.applied and not self.wraps:
            assert "shim" in layers, f"called applied, and a call of the target runs {layers}"
            assert layers[-1] == "upstream", f"called applied, and a call of the target runs {layers}"
        for place in (TARGET, *ALIASES):
            layers = layers_of(self.world.get(place))
            mine = layers.index("shim") if "shim" in layers else None
            if mine is not None and place not in self.put and not self.wraps:
                # A wrapper of somebody's that is on the target still may be beneath an alias that took it; nothing
                # was put on this name, so that shim's object there must not call a stranger's.
                assert "foreign" not in layers[mine:], f"{place}: shim's function calls {layers}"

    def end(self):
        """All take back what they have put there, and shim reverts: the very objects are back, and nothing is lost."""
        self.steps.append("end")
        while self.put:
            self.take(self.chance.choice(sorted(self.put)))
            if self.chance.random() < 0.5:
                self.look(self.chance.choice(("status", "revert")))
        shim.revert()
        report = shim.revert()
        if not self.wraps:  # else a name where shim stood around somebody's function may be told
            assert not report.lost, report.lost
        for place in () if self.reloaded else (TARGET, *ALIASES):
            assert self.world.get(place) is self.before[place], f"{place} holds {self.world.get(place)}"
        for place in (TARGET, *ALIASES) if self.reloaded else ():
            assert layers_of(self.world.get(place)) == ["upstream"], f"{place} holds {self.world.get(place)}"
        assert not shim._engine.engine.ENGINE.binder.slots


def make_world(root, monkeypatch, wraps=False):
    world = World(root, monkeypatch)
    target = {"target": CORE + TARGET, "wraps": "true"} if wraps else CORE + TARGET
    world.patch("p", [target])
    world.patch("q", [target])
    world.patch("r", [CORE + "other:other"])
    return world


def run_histories(root, seeds, steps=14, wraps=False):
    """The first line of what goes wrong for each of the seeds, with its steps."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = None
        for seed in seeds:
            with fresh_engine(monkeypatch):
                world = world or make_world(root, monkeypatch, wraps)
                monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
                history = History(world, random.Random(seed), wraps)
                try:
                    history.run(random.Random(seed).randrange(2, steps))
                except Exception as error:
                    found[seed] = f"{type(error).__name__}: {str(error).splitlines()[0]}", history.steps
                    with contextlib.suppress(Exception):
                        shim.revert()
    return found


@pytest.mark.no_cover
@pytest.mark.parametrize("wraps", [False, True])
def test_random_histories_end_as_they_began(tmp_path, wraps):
    found = run_histories(tmp_path, range(times(30, 1500)), wraps=wraps)
    assert not found, "\n".join(f"{seed}: {what} after {steps}" for seed, (what, steps) in found.items())

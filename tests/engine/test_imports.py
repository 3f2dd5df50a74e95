"""Modules that are imported after apply(): lazily, again, by several threads, or past the hook."""

import _imp
import contextlib
import importlib
import importlib.util
import sys
import threading
import time
import types
from importlib.machinery import SourceFileLoader

import pytest
from fake_world import same

import shim
from shim._engine import import_hook
from shim.testing.patience import patience

CORE = "megatron.core."


def lazy_import(name, loader_class=importlib.util.LazyLoader):
    """As in the recipe of the importlib documentation."""
    importlib.import_module("megatron.core")
    spec = importlib.util.find_spec(name)
    spec.loader = loader_class(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_unloaded(module):
    return issubclass(type(module), importlib.util._LazyModule)


class _LikePython312(importlib.util._LazyModule):
    """From Python 3.12 on a lazy module is still of its lazy class while its code runs."""

    def __getattribute__(self, attr):
        spec = object.__getattribute__(self, "__spec__")
        if not spec.loader_state.setdefault("is_loading", False):
            spec.loader_state["is_loading"] = True
            spec.loader.exec_module(self)
            object.__setattr__(self, "__class__", type(sys))
        return object.__getattribute__(self, attr)


class _LikeLoaderOfPython312(importlib.util.LazyLoader):
    def exec_module(self, module):
        super().exec_module(module)
        module_class = _LikePython312
        object.__setattr__(module, "__class__", module_class)


@pytest.mark.parametrize("loader", [importlib.util.LazyLoader, _LikeLoaderOfPython312])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lazy_module_stays_unloaded_and_is_patched_when_it_loads(patched_world, loader, when):
    """apply() does not load a lazy module; its first attribute read does, and finds the patch."""
    if when == "before":
        module = lazy_import(CORE + "ops", loader)
    shim.apply()
    if when == "after":
        module = lazy_import(CORE + "ops", loader)
    assert is_unloaded(module)
    assert shim.status()["count"].state == "pending"
    shim.apply()
    patched_world.get("other:other")
    assert is_unloaded(module)
    assert module.double(2) == ("count", 4)
    assert patched_world.get("layers:Layer")().forward(1) == ("count", 2)
    assert shim.status()["count"].state == "applied"
    shim.revert()
    assert module.double(2) == 4


def test_a_lazy_module_that_loads_after_the_revert_is_upstreams_own(patched_world):
    """A lazy module that shim waited for is untouched where it loads after revert()."""
    module = lazy_import(CORE + "ops")
    shim.apply()
    shim.revert()
    assert is_unloaded(module)
    assert module.double(2) == 4


def test_a_lazy_finder_is_respected(patched_world):
    """Where a finder hands out lazy loaders, the hook neither loads the module nor loses sight of it."""
    finder = next(f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder")

    class Lazy:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != CORE + "ops":
                return None
            spec = finder.find_spec(name, path, target)
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    shim.apply()
    sys.meta_path.insert(1, Lazy)
    module = importlib.import_module(CORE + "ops")
    assert is_unloaded(module)
    assert module.double(2) == ("count", 4)


def test_a_modules_getattr_is_not_fired(world):
    """Looking for aliases reads dictionaries, and never fires a module-level __getattr__."""
    world.module(
        "noisy", "SEEN = []\n\n\ndef __getattr__(name):\n    SEEN.append(name)\n    raise AttributeError(name)\n"
    )
    world.patch("p", [CORE + "ops:double"])
    noisy = importlib.import_module(CORE + "noisy")
    world.get("users:twice")
    noisy.SEEN.clear()
    shim.apply()
    shim.status()
    shim.revert()
    assert noisy.SEEN == []


def test_reload_stays_patched(patched_world):
    """importlib.reload gives new functions: they are patched too, and revert leaves them as upstream's own."""
    patched_world.snapshot()
    original = patched_world.get("users:twice")
    shim.apply()
    taken = patched_world.get("users:twice")
    for _ in range(2):
        module = importlib.reload(sys.modules[CORE + "ops"])
        assert module.double(2) == ("count", 4)
        assert shim.status()["count"].state == "applied"
    assert patched_world.get("users:twice") is taken
    shim.revert()
    assert patched_world.get("users:twice") is original
    assert patched_world.get("ops:double").__code__.co_filename.endswith("ops.py")
    assert not hasattr(patched_world.get("ops:double"), "__wrapped__")
    assert patched_world.get("users:Holder.call") is original


def test_a_reload_that_fails_half_way_forgets_nothing(patched_world):
    """Where the module's code raises during a reload, revert still takes our wrapper off."""
    original = patched_world.get("ops:double")
    path = patched_world.root / "megatron" / "core" / "ops.py"
    text = path.read_text()
    shim.apply()
    path.write_text("raise RuntimeError('half way')\n" + text)
    with pytest.raises(RuntimeError):
        importlib.reload(sys.modules[CORE + "ops"])
    shim.revert()
    assert patched_world.get("ops:double") is original


def test_a_reload_takes_foreign_patches_away_and_brings_ours_back(patched_world):
    """A reload wipes what somebody had put on top; the new function is upstream's, so it is patched."""
    patched_world.get("ops:double")
    shim.apply()
    patched_world.set("ops:double", lambda x: None)
    shim.apply(only=[])
    assert shim.apply()["count"].state == "conflict"
    importlib.reload(sys.modules[CORE + "ops"])
    assert shim.apply()["count"].state == "pending"  # layers is not imported
    assert patched_world.get("ops:double")(2) == ("count", 4)


def test_reimport_stays_patched(patched_world):
    """A module that was deleted from sys.modules and imported again is patched; the old one is given back too."""
    old, old_users = patched_world.get("ops:double"), patched_world.get("users:Holder")
    old_module, old_call = sys.modules[CORE + "ops"], vars(old_users)["call"]
    shim.apply()
    del sys.modules[CORE + "ops"], sys.modules[CORE + "users"]
    assert patched_world.get("ops:double")(2) == ("count", 4)
    assert patched_world.get("users:twice") is patched_world.get("ops:double")
    assert sys.modules[CORE + "ops"] is not old_module
    shim.revert()
    assert old_module.double is old
    assert vars(old_users)["call"] is old_call
    assert patched_world.get("users:twice") is patched_world.get("ops:double")
    assert not hasattr(patched_world.get("ops:double"), "__wrapped__")


def test_a_copy_somebody_loads_for_himself_is_not_ours(patched_world):
    """Executing a second copy of a target module outside of sys.modules does not disturb the first."""
    before = patched_world.snapshot()
    shim.apply()
    spec = importlib.util.find_spec(CORE + "ops")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.double(2) == 4
    assert shim.status()["count"].state == "applied"
    shim.revert()
    assert same(before, patched_world.snapshot()) == []


def test_no_trace_of_the_hook_is_left_in_a_module(patched_world):
    """__loader__ and __spec__.loader of a patched module are upstream's, so that pkgutil and inspect work."""
    import inspect

    shim.apply()
    module = importlib.import_module(CORE + "ops")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    assert "def double" in inspect.getsource(module)


def test_the_hook_is_there_only_while_applied(patched_world):
    """apply() puts one finder in front of sys.meta_path, revert() takes it out."""
    before = list(sys.meta_path)
    shim.apply()
    shim.apply()
    assert sys.meta_path[1:] == before
    shim.revert()
    assert sys.meta_path == before


def test_disabled_installs_nothing(patched_world, monkeypatch):
    """MEGATRON_SHIM_DISABLE=1 leaves sys.meta_path and every module alone, also under require."""
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    before, meta_path = patched_world.snapshot(), list(sys.meta_path)
    assert shim.apply(require=["count"], strict=True)["count"].state == "excluded"
    assert [f for f in sys.meta_path if getattr(f, "is_shim_finder", False)] == []
    assert sys.meta_path == meta_path
    assert same(before, patched_world.snapshot()) == []


def test_a_module_that_came_in_past_the_hook_is_caught(patched_world):
    """A finder in front of ours has loaded a target by a loader of its own: the next import or status() binds it."""
    finder = next(f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder")

    class Own:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = finder.find_spec(name, path, target)
            if name.startswith(CORE):
                spec.loader = SourceFileLoader(spec.loader.name, spec.loader.path)
            return spec

    shim.apply()
    sys.meta_path.insert(0, Own)
    ops = importlib.import_module(CORE + "ops")
    assert ops.double(2) == 4
    sys.meta_path.remove(Own)
    layers = importlib.import_module(CORE + "layers")
    assert ops.double(2) == ("count", 4)
    assert layers.Layer().forward(1) == ("count", 2)
    assert shim.status()["count"].state == "applied"


def test_apply_inside_the_import_of_a_target(world):
    """apply() called by a target's own code, before the target is complete, binds it when it is."""
    world.module("early", "def f(x):\n    return x\n\n\nimport shim\n\nshim.apply()\n\n\ndef g(x):\n    return x\n")
    world.patch("p", [CORE + "early:f", CORE + "early:g"])
    early = importlib.import_module(CORE + "early")
    assert shim.status()["p"].state == "applied"
    assert (early.f(1), early.g(1)) == (("p", 1), ("p", 1))


def test_apply_while_another_thread_imports(world):
    """apply() waits for a target that another thread is importing, and binds it whole."""
    world.module("slow", "import time\n\n\ndef f(x):\n    return x\n\n\ntime.sleep(0.3)\n\n\ndef g(x):\n    return x\n")
    world.patch("p", [CORE + "slow:f", CORE + "slow:g"])
    importlib.import_module("megatron.core")
    thread = threading.Thread(target=importlib.import_module, args=(CORE + "slow",))
    thread.start()
    while CORE + "slow" not in sys.modules:
        time.sleep(0.001)
    report = shim.apply()
    thread.join(patience())
    assert report["p"].state == "applied"


def test_threads_do_not_deadlock(patched_world):
    """apply, revert, plan, status and imports from many threads at once end, and a last revert restores all."""
    for number in range(30):
        patched_world.module(f"extra{number}", "from megatron.core.ops import double\nimport megatron.core.layers\n")
    before = patched_world.snapshot()
    errors = []
    stop = time.monotonic() + 2

    def act(number, turn):
        if number == 0:
            shim.apply(only=["count"] if turn % 2 else [])
        elif number == 1:
            shim.apply() if turn % 3 else shim.revert()
        elif number == 2:
            shim.plan(), shim.status()
        elif number == 3:
            with shim.patched(only=["count"]):
                patched_world.get("ops:double")(2)
        else:
            importlib.import_module(CORE + f"extra{turn % 30}")
            sys.modules.pop(CORE + f"extra{turn % 30}", None)

    def work(number):
        try:
            turn = 0
            while time.monotonic() < stop:
                turn += 1
                with contextlib.suppress(shim.OptionError) if number < 2 else contextlib.nullcontext():
                    act(number, turn)  # refused while another thread is within patched()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience())
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert errors == []
    shim.revert()
    assert same(before, patched_world.snapshot()) == []


def test_a_circular_importer_takes_the_patched_function(world):
    """A module that takes an alias while the target's module is still being imported holds the patched function."""
    world.module("first", "def f(x):\n    return x\n\n\nimport megatron.core.second\n")
    world.module("second", "from megatron.core.first import f as taken\n\n\nclass Holder:\n    call = taken\n")
    world.patch("p", [CORE + "first:f"])
    shim.apply()
    assert world.get("first:f")(1) == ("p", 1)
    assert world.get("second:taken") is world.get("first:f")
    assert world.get("second:Holder.call") is world.get("first:f")
    shim.revert()
    assert world.get("second:taken")(1) == 1


def while_a_module_keeps_a_function(world, monkeypatch, change):
    """Call `change` while a thread imports `slow`, between reading ops.double and storing it."""
    reads, goes_on = threading.Event(), threading.Event()
    monkeypatch.setitem(
        sys.modules, "between", types.SimpleNamespace(wait=lambda: (reads.set(), goes_on.wait(patience())))
    )
    world.module(
        "slow",
        """
        import sys
        from megatron.core import ops

        kept = (lambda found: (sys.modules["between"].wait(), found)[1])(ops.double)
        """,
    )
    thread = threading.Thread(target=lambda: world.get("slow:kept"))
    thread.start()
    reads.wait(patience())
    change()
    goes_on.set()
    thread.join(patience())


def test_a_name_that_was_read_before_and_stored_after_is_found_when_the_import_is_over(world, monkeypatch):
    """The search for aliases of apply() comes too early, and the next look from shim binds the name."""
    world.patch("p", [CORE + "ops:double"])
    original = world.get("ops:double")
    while_a_module_keeps_a_function(world, monkeypatch, shim.apply)
    assert shim.status()["p"].state == "applied"
    assert world.get("slow:kept") is world.get("ops:double") is not original
    shim.revert()
    assert world.get("slow:kept") is world.get("ops:double") is original


def test_one_that_read_shims_function_before_a_revert_is_given_upstreams(world, monkeypatch):
    world.patch("p", [CORE + "ops:double"])
    original = world.get("ops:double")
    shim.apply()
    while_a_module_keeps_a_function(world, monkeypatch, shim.revert)
    shim.status()
    assert world.get("slow:kept") is world.get("ops:double") is original


def test_patch_modules_are_not_imported_within_the_search_for_a_module(world, monkeypatch):
    """There importlib holds a lock of the whole process, for which another thread that imports the same patch module
    waits: what came in past the hook is bound when the module that is searched for has run."""
    world.patch("p", [CORE + "ops:double"])
    shim.apply()
    held, real = [], importlib.import_module

    def watching(name, *args):
        if name.startswith("fake_patches"):
            held.append(_imp.lock_held())
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", watching)
    hooks = [finder for finder in sys.meta_path if getattr(finder, "is_shim_finder", False)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hooks]
    world.get("ops:double")
    sys.meta_path[:0] = hooks
    world.get("other:other")
    assert held == [False]
    assert world.get("ops:double")(2) == ("p", 4)


def test_what_a_patch_module_imports_does_not_bring_in_other_patch_modules(world):
    """Two of them share a helper, which itself imports something, while a target that came in past the hook waits."""
    helper = world.root / "fake_patches" / "helper.py"
    helper.write_text(
        "import functools\nimport fake_patches.deeper\n\n\ndef wrap(original):\n    @functools.wraps(original)\n"
        "    def wrapper(*args, **kwargs):\n        return original(*args, **kwargs)\n\n    return wrapper\n"
    )
    (world.root / "fake_patches" / "deeper.py").write_text("")
    source = """
        from fake_patches.helper import wrap

        def bindings(variant, options):
            return dict.fromkeys(TARGETS, wrap)
        """
    world.patch("p", [CORE + "ops:halve"], source)
    world.patch("q", [CORE + "other:other"], source)
    shim.apply()
    hooks = [finder for finder in sys.meta_path if getattr(finder, "is_shim_finder", False)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hooks]
    world.get("ops:halve"), world.get("other:other")
    sys.meta_path[:0] = hooks
    world.get("users:twice")
    assert shim.status().applied == ("p", "q")


def test_half_imported_modules_are_known_where_importlib_shows_no_locks(monkeypatch):
    half = types.ModuleType("half")
    half.__spec__ = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "half", half)
    monkeypatch.setattr(import_hook, "importlib", types.SimpleNamespace())
    assert "half" in import_hook.locked_modules()
    half.__spec__._initializing = False
    assert "half" not in import_hook.locked_modules()

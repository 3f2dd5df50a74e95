"""Modules that are imported although a package they import is missing: only they see a stand-in, which is of no use."""

import builtins
import copy
import importlib
import importlib.util
import inspect
import pickle
import sys

import pytest
from unit_helpers import REPOSITORY

import shim

CORE = "megatron.core."
PACKAGE = "fake_kernels"
GUEST = """
    import fake_kernels
    import fake_kernels.language as fl
    from fake_kernels import jit
    from fake_kernels.language import float32 as taken

    from megatron.core import guard

    SIZE = fl.constexpr(128)
    TYPES = {"float": fl.float32, "int": fl.int64}


    @fake_kernels.jit
    def double(x, n: fl.constexpr, m: fl.constexpr | None = None, *rest: int | fl.constexpr):
        "Doubles."
        return x * 2


    @fake_kernels.autotune(configs=[fake_kernels.Config({"n": 1}, num_warps=4)], key=["n"])
    @jit
    def tuned(x):
        return x


    def launch(x):
        return double[(1,)](x, n=1)


    def later():
        import fake_kernels.runtime as runtime

        return runtime
    """
GUARD = "try:\n    import fake_kernels as found\nexcept ImportError:\n    found = None\n"


PATCH = """
    from fake_patches.stand_ins import StandIns
    from shim._resources import Bindings

    STAND_INS = StandIns("fake_kernels")


    def bindings(variant, options):
        factory = lambda original: lambda x, scale=2: (ID, original(x, scale))
        return Bindings(dict.fromkeys(TARGETS, factory), STAND_INS.resource())
    """


class Kernels:
    """The package that may be missing; it is until it is written."""

    def __init__(self, world):
        self.world = world

    def write(self, source="def __getattr__(name):\n    return lambda *args, **kwargs: 'real'\n"):
        folder = self.world.root / PACKAGE
        folder.mkdir()
        (folder / "__init__.py").write_text(source)
        importlib.invalidate_caches()


@pytest.fixture
def kernels(world):
    """A patch on ops:double that lets megatron.core.guest and megatron.core.other_guest be imported without it."""
    world.module("guest", GUEST)
    world.module("other_guest", "import fake_kernels\n")
    world.module("guard", GUARD)
    source = REPOSITORY / "patches" / "megatron_core" / "paged_stash" / "stand_ins.py"
    (world.root / "fake_patches" / "stand_ins.py").write_text(source.read_text())
    world.patch("p", [CORE + "ops:double"], PATCH, options={"size": 1})
    act_before(world, f"{CORE}guest, {CORE}other_guest")
    yield Kernels(world)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def act_before(world, modules):
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace("    delete_when: never", f"    before: [{modules}]\n    delete_when: never"))


def imported(name):
    return importlib.import_module(CORE + name)


def has_ordinary_builtins(module):
    return vars(module)["__builtins__"] is vars(builtins)


def test_the_import_fails_on_stock_and_succeeds_after_apply(kernels):
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        imported("guest")
    shim.apply()
    guest = imported("guest")
    assert repr(guest.SIZE) == f"<stand-in for {PACKAGE}.language.constexpr(...)>"
    assert repr(guest.later()) == f"<stand-in for {PACKAGE}.runtime>"
    assert guest.taken is guest.TYPES["float"] is guest.fl.float32 is not guest.TYPES["int"]


def test_nobody_else_sees_the_stand_in(kernels):
    """Neither a guard in a module that is imported meanwhile, nor whoever asks for the package in other ways."""
    shim.apply()
    guest = imported("guest")
    assert guest.guard.found is None
    assert has_ordinary_builtins(guest.guard)
    assert not has_ordinary_builtins(guest)
    assert [name for name in sys.modules if name.startswith(PACKAGE)] == []
    assert importlib.util.find_spec(PACKAGE) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(PACKAGE)


def test_where_the_package_is_there_the_modules_are_untouched(kernels):
    kernels.write()
    shim.apply()
    other = imported("other_guest")
    assert has_ordinary_builtins(other)
    assert other.fake_kernels is sys.modules[PACKAGE]


def test_who_uses_it_is_told_what_is_missing(kernels):
    """Each way to run a function that was decorated by it; what is asked of it otherwise stays harmless."""
    shim.apply()
    guest = imported("guest")
    message = rf"megatron\.core\.guest\.double cannot be used, because the package {PACKAGE} is missing.*pip install"
    for use in (guest.launch, guest.double, guest.double[(1,), 2], lambda x: guest.double[1][2](x)):
        with pytest.raises(shim.StandInError, match=message):
            use(1)
    with pytest.raises(shim.StandInError, match=r"guest\.tuned cannot"):
        guest.tuned(1)
    assert not issubclass(shim.StandInError, ImportError)
    with pytest.raises(AttributeError, match=message):
        guest.double.warmup(1)


def test_a_decorated_function_is_still_readable(kernels):
    shim.apply()
    double = imported("guest").double
    assert (double.__name__, double.__doc__, double.__module__) == ("double", "Doubles.", CORE + "guest")
    assert repr(double) == f"<{CORE}guest.double, which needs the missing package {PACKAGE}>"
    assert list(inspect.signature(double).parameters) == ["x", "n", "m", "rest"]


def test_a_value_is_not_made_up(kernels):
    """What needs one raises, where a default of Python would let a program go on."""
    shim.apply()
    value = imported("guest").fl.cdiv(3, 2)
    for use in (bool, int, float, range, len, list, lambda x: x + 1, lambda x: x > 1, lambda x: 2 * x):
        with pytest.raises(shim.StandInError, match=r"fake_kernels\.language\.cdiv\(\.\.\.\) cannot"):
            use(value)
    for protocol in ("__wrapped__", "__torch_function__", "__array__", "__version__"):
        assert not hasattr(value, protocol)
    assert inspect.unwrap(value) is value
    assert repr(copy.deepcopy(value)) == repr(pickle.loads(pickle.dumps(value))) == repr(value)


@pytest.mark.parametrize(
    ("name", "source", "missing"),
    [
        ("third", "import fake_kernels\n", PACKAGE),
        ("other_guest", "from fake_kernels import *\n", PACKAGE),
        ("other_guest", "import fake_kernels\nimport fake_dependency\n", "fake_dependency"),
        # Upstream has modules of such names, which import the package in their turn, and are not named by the patch.
        ("other_guest", "from .fake_kernels import x\n", "fake_kernels"),
    ],
    ids=["a module that is not named", "a star", "another package", "a relative import"],
)
def test_what_the_patch_does_not_stand_in_for_fails_as_on_stock(kernels, name, source, missing):
    kernels.world.module("fake_kernels", "import fake_kernels\n")
    kernels.world.module(name, source)
    shim.apply()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
        imported(name)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libkernels.so: broken')", "libkernels.so: broken"),
        ("import fake_dependency", "fake_dependency"),
        ("import fake_kernels.gone", "fake_kernels.gone"),
        ("raise ValueError('broken')", "broken"),
    ],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_broken_package_is_not_hidden(kernels, source, said, when):
    """Neither one that was there all the time, nor one that is installed while the process runs."""
    shim.apply()
    if when == "before":
        kernels.write(source)
        with pytest.raises((ImportError, ValueError), match=said):
            imported("other_guest")
        assert CORE + "other_guest" not in sys.modules
    else:
        later = imported("guest").later
        kernels.write(source)
        with pytest.raises((ImportError, ValueError), match=said):
            later()


def test_a_submodule_that_the_package_lacks_is_not_hidden(kernels):
    shim.apply()
    later = imported("guest").later
    kernels.write("")
    with pytest.raises(ModuleNotFoundError, match=r"fake_kernels\.runtime"):
        later()


def test_a_package_that_is_forbidden_for_another_reason_is_not_hidden(kernels):
    """Its finder lacks something itself."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == PACKAGE:
                raise ModuleNotFoundError("No module named 'fake_dependency'", name="fake_dependency")

    sys.meta_path.insert(0, Finder)
    shim.apply()
    with pytest.raises(ModuleNotFoundError, match="fake_dependency"):
        imported("other_guest")


def test_an_import_that_is_forbidden_counts_as_missing(kernels, monkeypatch):
    """None in sys.modules, as test suites put it there, also where the package is installed."""
    kernels.write()
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    shim.apply()
    assert repr(imported("guest").fl) == f"<stand-in for {PACKAGE}.language>"
    assert sys.modules[PACKAGE] is None


def test_reload(kernels):
    """The stand-in again, as long as the package is missing; then the package, as if shim had never been there."""
    shim.apply()
    other = imported("other_guest")
    importlib.reload(other)
    assert repr(other.fake_kernels) == f"<stand-in for {PACKAGE}>"
    kernels.write()
    importlib.reload(other)
    assert other.fake_kernels is sys.modules[PACKAGE]
    assert has_ordinary_builtins(other)


def test_after_revert_what_was_imported_stays_and_nothing_else_is(kernels):
    shim.apply()
    guest = imported("guest")
    shim.revert()
    assert imported("guest") is guest
    assert has_ordinary_builtins(guest)
    assert repr(guest.later()) == f"<stand-in for {PACKAGE}.runtime>"
    with pytest.raises(shim.StandInError):
        guest.launch(1)
    for fails in (lambda: imported("other_guest"), lambda: importlib.reload(guest)):
        with pytest.raises(ModuleNotFoundError, match=PACKAGE):
            fails()


def test_builtins_that_somebody_else_has_put_there_are_left_alone(kernels):
    shim.apply()
    guest = imported("guest")
    vars(guest)["__builtins__"] = theirs = dict(vars(builtins))
    shim.revert()
    assert vars(guest)["__builtins__"] is theirs


def test_only_for_a_patch_that_is_wanted(kernels, monkeypatch):
    shim.apply(exclude=["p"])
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        imported("guest")
    with shim.patched():
        imported("other_guest")
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        imported("guest")
    monkeypatch.setenv("MEGATRON_SHIM_DISABLE", "1")
    shim.apply()
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        imported("guest")


def test_a_named_module_may_be_a_target_too(kernels):
    kernels.world.module("ops", "import fake_kernels\n\n\ndef double(x, scale=2):\n    return x * scale\n")
    kernels.world.write()
    act_before(kernels.world, f"{CORE}ops")
    shim.apply()
    assert imported("ops").double(2) == ("p", 4)
    assert shim.status()["p"].state == "applied"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_lazy_module_finds_the_stand_in_when_it_is_loaded(kernels, monkeypatch, when, wrapped):
    """As in the recipe of the importlib documentation, or by a finder that hands out lazy loaders."""
    importlib.import_module("megatron.core")
    if when == "after":
        shim.apply()
    if wrapped:
        real = next(f for f in sys.meta_path if getattr(f, "__name__", "") == "PathFinder")

        class Lazy:
            @staticmethod
            def find_spec(name, path=None, target=None):
                spec = real.find_spec(name, path, target) if name == CORE + "other_guest" else None
                if spec is not None:
                    spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec

        sys.meta_path.insert(1, Lazy)
        module = imported("other_guest")
    else:
        spec = importlib.util.find_spec(CORE + "other_guest")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    if when == "before":
        shim.apply()
    assert issubclass(type(module), importlib.util._LazyModule)
    assert "__builtins__" not in object.__getattribute__(module, "__dict__")
    assert repr(module.fake_kernels) == f"<stand-in for {PACKAGE}>"
    assert not has_ordinary_builtins(module)


def test_the_package_is_looked_for_without_the_lock_of_shim(kernels, monkeypatch):
    """A finder may import something, and so wait for another thread that waits for the lock."""
    from shim._engine import engine as _engine

    held = []

    class Asked:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == PACKAGE:
                held.append(_engine.ENGINE.lock._is_owned())

    sys.meta_path.insert(0, Asked)
    shim.apply()
    imported("other_guest")
    assert held and not any(held)


def test_another_option_keeps_the_stand_in_and_the_last_that_has_it_takes_it_back(kernels):
    shim.apply()
    guest = imported("guest")
    shim.apply(options={"p": {"size": 2}})
    assert not has_ordinary_builtins(guest)
    assert repr(guest.later()) == f"<stand-in for {PACKAGE}.runtime>"
    shim.revert()
    assert has_ordinary_builtins(guest)


def test_a_revert_while_it_is_given_takes_it_back(kernels, monkeypatch):
    """As another thread may do, between the question for the package and the write."""
    shim.apply()
    imported("guest")
    there = sys.modules["fake_patches.stand_ins"]

    def missing(package):
        shim.revert()
        return True

    monkeypatch.setattr(there, "_is_missing", missing)
    with pytest.raises(ModuleNotFoundError, match=PACKAGE):
        imported("other_guest")
    assert has_ordinary_builtins(sys.modules[CORE + "guest"])


def test_a_patch_that_cannot_be_loaded_fails_as_it_does_for_a_target(kernels):
    kernels.write()
    (kernels.world.root / "fake_patches" / "stand_ins.py").write_text("raise ValueError('broken')\n")
    shim.apply()
    with pytest.raises(shim.BindError, match="broken"):
        imported("other_guest")
    assert shim.status()["p"].state == "failed"

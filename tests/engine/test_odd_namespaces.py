"""shim reads the namespaces of all modules and classes of a process, whatever they are, and raises for none of them."""

import subprocess
import sys
import types

import pytest

import shim
from shim._engine.names import find_aliases, namespace_of

ODD = "somebodys_odd_module"


def double(x):
    return 2 * x


@pytest.fixture
def put(monkeypatch):
    """Puts an object into sys.modules."""

    def enter(module, name=ODD):
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return enter


def found_in(module):
    return [(owner, name) for owner, name, _ in find_aliases([double]) if owner is module]


def test_a_class_that_c_code_has_not_made_ready_is_empty():
    """As in `_socket` without `socket`: the type has no dictionary yet, before Python 3.12."""
    code = (
        "import _socket, sys\n"
        "from shim._engine.names import find_aliases, namespace_of\n"
        "assert len(find_aliases([_socket.socket, _socket.dup], list(sys.modules))) >= 2\n"
        "print(len(namespace_of(_socket.SocketType)), 'socket' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "False"
    if sys.version_info < (3, 12):
        assert done.stdout.split()[0] == "0"


class Unhashable(type):
    """Says that its classes are equal to everything, and so takes their hash away."""

    def __eq__(cls, other):
        return True


class Liar(type):
    """Its classes are found among others by a hash that is no one's."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(type)


class Closed(type):
    """Its classes show nothing."""

    def __getattribute__(cls, name):
        raise RuntimeError(name)

    def __instancecheck__(cls, other):
        raise RuntimeError("instance")

    def __subclasscheck__(cls, other):
        raise RuntimeError("subclass")


@pytest.mark.parametrize("kind", [Unhashable, Liar, Closed])
def test_metaclasses_that_lie(put, kind):
    """As values of a module, as types of its values, as kinds of descriptor and as metaclasses."""
    module = put(types.ModuleType(ODD))
    module.cls = kind("cls", (), {"held": double, "static": staticmethod(double)})
    module.instance = object.__new__(module.cls)
    module.descriptor = kind("descriptor", (staticmethod,), {})
    module.kept = staticmethod.__new__(module.descriptor)
    module.metaclass = kind("metaclass", (type,), {})
    module.double = double
    found = [(owner, name) for owner, name, _ in find_aliases([double])]
    for place in ((module, "double"), (module.cls, "held"), (module.cls, "static")):
        assert any(owner is place[0] and name == place[1] for owner, name in found), place


class Property(types.ModuleType):
    """Computes another dictionary than its own."""

    @property
    def __dict__(self):
        raise AttributeError("a dictionary")


class Guarded(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"{name} is not for shim to read")


@pytest.mark.parametrize("kind", [Property, Guarded])
def test_modules_that_hide_their_dictionary(put, kind):
    module = put(kind(ODD))
    types.ModuleType.__setattr__(module, "double", double)
    assert found_in(module) == [(module, "double")]
    assert namespace_of(module)["double"] is double


class Slots:
    __slots__ = ()


@pytest.mark.parametrize(
    "thing", [None, 3, Slots(), object(), {"double": double}, type("Sub", (dict,), {})(double=double)]
)
def test_what_is_no_module_is_passed_over(put, thing):
    put(thing)
    assert all(owner is not thing for owner, _, _ in find_aliases([double]))
    namespace_of(thing)


class Spec:
    def __getattr__(self, name):
        raise RuntimeError(name)


SPECS = {"raises": Spec(), "mock": types.SimpleNamespace(_initializing=types.SimpleNamespace()), "number": 3}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("gone", [(), ("__name__", "__spec__")])
def test_modules_with_an_odd_spec_or_without_a_name(world, put, spec, gone):
    """apply, status, an import and revert go on beside it."""
    world.patch("p", ["megatron.core.ops:double", "megatron.core.other:other"])
    module = put(types.ModuleType(ODD))
    put(types.ModuleType(ODD), 3)  # a key that is no name
    module.__spec__ = SPECS[spec]
    for name in gone:
        del vars(module)[name]
    upstream = module.double = world.get("ops:double")
    shim.apply()
    world.get("other:other")
    assert shim.status()["p"].state == "applied" and module.double is world.get("ops:double") is not upstream
    del sys.modules[3]  # the fixtures expect names
    module.double = print
    assert any("was replaced" in text for text in shim.status().lost)
    module.double = upstream
    shim.revert()
    assert module.double is upstream is world.get("ops:double")

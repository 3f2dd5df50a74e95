"""A small fake megatron-core with patches for it, so that the engine can be tested without torch and in no time."""

from __future__ import annotations

import contextlib
import importlib
import sys
import textwrap
import types
from pathlib import Path

from pinned import write_pins

from shim import _api
from shim._engine import engine as _engine
from shim._matrix import load as _matrix
from shim._planning.options import VARIABLES

MODULES = {
    "package_info": """
        MAJOR, MINOR, PATCH, PRE_RELEASE = 9, 9, 0, ""
        MAJOR = 9
        MINOR = 9
        PATCH = 0
        PRE_RELEASE = ""
        """,
    "ops": """
        LIMIT = 10


        def double(x, scale=2):
            "Doubles."
            return x * scale


        def halve(x):
            return x / 2
        """,
    "layers": """
        class Base:
            def forward(self, x):
                return x

            def tag(self):
                return "base"


        class Layer(Base):
            def forward(self, x):
                return x + 1

            @staticmethod
            def make(x):
                return x

            @classmethod
            def build(cls, x):
                return cls, x

            @property
            def size(self):
                return 3

            def backward(self, x):
                return x - 1


        class Child(Layer):
            pass
        """,
    "users": """
        from megatron.core.ops import double
        from megatron.core.ops import double as twice


        class Holder:
            call = double
            run = staticmethod(double)
            make = classmethod(double)
        """,
    "other": """
        def other(x):
            return x
        """,
}

ALONE = object()  # in the place of what a target inherits: bound under this name and no other
ADDED = object()  # in the place of what a target inherits: the release lacks it

# A wrapper that says which patch it is from: 2 becomes (id, 2).
WRAPPER = """
    import functools


    def wrap(original):
        if isinstance(original, property):
            return property(wrap(original.fget))
        if not callable(original):
            return (ID, original)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return (ID, original(*args, **kwargs))

        return wrapper


    def bindings(variant, options):
        return dict.fromkeys(TARGETS, wrap)


    def probe(module, method, models):
        # An override has the effect of this patch where its result begins with the id.
        result = getattr(module, method.rpartition(".")[2])(2)
        return isinstance(result, tuple) and result[0] == ID
    """


def _entry(target) -> str:
    """A target as the matrix has it; see World.patch."""
    if isinstance(target, dict):
        return "{" + ", ".join(f"{key}: {value}" for key, value in target.items()) + "}"
    name, inherits = (target, None) if isinstance(target, str) else target
    flags = {ALONE: "alone: true", ADDED: "added: true", None: ""}
    more = flags.get(inherits, f"inherits: {inherits}")
    return f"{{target: {name}, {more}}}" if more else name


def trust_fake_patches(change=setattr) -> None:
    """Have apply() take the patches of the fake world in silence, so that no test of the engine need say so.

    What a matrix of one's own takes otherwise is tested in tests/unit/test_trust.py.
    """
    change(_matrix, "TRUSTED", (*_matrix.TRUSTED, "fake_patches"))
    change(_api, "_of_another_matrix", lambda matrix: [])


@contextlib.contextmanager
def fresh_engine(monkeypatch):
    """An engine that has applied nothing, and a process that has imported nothing of the fake world."""
    engine = _engine.Engine()
    monkeypatch.setattr(_engine, "ENGINE", engine)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    trust_fake_patches(monkeypatch.setattr)
    modules, meta_path = dict(sys.modules), list(sys.meta_path)
    try:
        yield engine
    finally:
        engine.watch.hook.remove()
        engine.notes.follow(False)
        sys.meta_path[:] = meta_path
        for name in set(sys.modules) - set(modules):
            if name.partition(".")[0] in ("megatron", "fake_patches"):
                del sys.modules[name]


class Model:
    """What check() asks of a torch module: its modules."""

    def __init__(self, *modules):
        self.inner = modules

    def modules(self):
        return iter(self.inner)


class World:
    """The fake tree below `root`, in front of sys.path, and a matrix with pins for it in MEGATRON_SHIM_MATRIX.

    One release that is imported and patched. unit_helpers.World has three that are only read, to choose among.
    """

    def __init__(self, root: Path, monkeypatch=None) -> None:
        self.root = root
        self.matrix = root / "matrix.yaml"
        self.patches: dict[str, dict] = {}
        (root / "fake_patches").mkdir(parents=True)
        (root / "fake_patches" / "__init__.py").touch()
        for name, source in MODULES.items():
            self.module(name, source)
        (root / "megatron" / "core" / "__init__.py").touch()
        if monkeypatch is not None:
            monkeypatch.syspath_prepend(str(root))
            monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(self.matrix))
            monkeypatch.setattr(sys, "dont_write_bytecode", True)
        self.write()

    def module(self, name: str, source: str) -> str:
        """Add megatron.core.<name>; returns its full name."""
        path = self.root / "megatron" / "core" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"megatron.core.{name}"

    def patch(
        self,
        id: str,
        targets,
        source: str = WRAPPER,
        *,
        kind="correctness",
        options=None,
        pins=None,
        reads=(),
        probe=(),
        changes="nothing",
        concerns=(),
    ) -> None:
        """Add a patch. `targets` are targets, pairs of a target and what it inherits, or ADDED, or the mappings of a
        matrix; `source` is its module. `probe`: the methods that it tries. `concerns`: as in
        patch.yaml, such as "mtp+packed"."""
        self.patches[id] = {"targets": targets, "kind": kind, "options": options or {}, "pins": pins or {}}
        self.patches[id] |= {"reads": reads, "probe": probe}
        self.patches[id] |= {"changes": changes, "concerns": concerns}
        names = [t if isinstance(t, str) else t["target"] if isinstance(t, dict) else t[0] for t in targets]
        head = f"ID = {id!r}\nTARGETS = {names!r}\n"
        path = self.root / "fake_patches" / f"{id.replace('-', '_')}.py"
        path.write_text(head + textwrap.dedent(source))
        importlib.invalidate_caches()
        self.write()

    def write(self) -> None:
        """Write the matrix, and beside it the fingerprints of the fake tree as pins."""
        lines = ["supported:", '  megatron-core: ["9.9.0"]', "patches:" if self.patches else "patches: {}"]
        for id, patch in self.patches.items():
            lines += [
                f"  {id}:",
                f"    summary: the fake patch {id}",
                f"    kind: {patch['kind']}",
                f"    changes: {patch['changes']}",
                "    distribution: megatron-core",
                f"    module: fake_patches.{id.replace('-', '_')}",
                "    variants:",
                "      only:",
                '        applies: {megatron-core: ">=9.9,<10"}',
                "        targets:",
                *(f"          - {_entry(target)}" for target in patch["targets"]),
                *(["        reads:"] if patch["reads"] else []),
                *(f"          - {body}" for body in patch["reads"]),
                "    delete_when: never",
            ]
            lines += [f"    concerns: [{', '.join(patch['concerns'])}]"] if patch["concerns"] else []
            lines += [f"    probe: [{', '.join(patch['probe'])}]"] if patch["probe"] else []
            if patch["options"]:
                lines += ["    options:"] + [f"      {name}: {value}" for name, value in patch["options"].items()]
        self.matrix.write_text("\n".join(lines) + "\n")
        write_pins(self.matrix, lambda *_: self.root, {id: patch["pins"] for id, patch in self.patches.items()})

    # What tests look at

    def get(self, place: str):
        """The object in the dictionary at "module:Class.name", below megatron.core; "missing" where there is none."""
        module, _, qualname = place.partition(":")
        owner = importlib.import_module(f"megatron.core.{module}")
        *path, name = qualname.split(".")
        for part in path:
            owner = vars(owner)[part]
        return vars(owner).get(name, "missing")

    def set(self, place: str, value) -> None:
        module, _, qualname = place.partition(":")
        owner = importlib.import_module(f"megatron.core.{module}")
        *path, name = qualname.split(".")
        for part in path:
            owner = vars(owner)[part]
        if value == "missing":
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def snapshot(self, *modules: str) -> dict[tuple[str, str], object]:
        """Every object of the dictionaries of these modules and of their classes, by (owner, name)."""
        found = {}
        for name in modules or ("ops", "layers", "users", "other"):
            module = importlib.import_module(f"megatron.core.{name}")
            owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
            for owner in owners:
                for key, value in vars(owner).items():
                    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property, type, int, tuple)):
                        found[f"{name}:{owner.__name__}", key] = value
        return found


# Every place of `ops.double`.
DOUBLE = [
    ("ops:megatron.core.ops", "double"),
    ("users:Holder", "call"),
    ("users:Holder", "make"),
    ("users:Holder", "run"),
    ("users:megatron.core.users", "double"),
    ("users:megatron.core.users", "twice"),
]


class Places(list):
    """A list that is compared and never taken for a yes or a no: `assert same(...)` would ask for a difference."""

    def __bool__(self) -> bool:
        raise TypeError("say which places differ: same(before, after) == [...]")


def same(before, after) -> Places:
    """The places at which two snapshots do not hold the identical object, sorted."""
    return Places(sorted(k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)))

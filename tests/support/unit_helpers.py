"""Fake releases, matrices and subprocesses for the unit tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from pinned import write_pins

from shim._matrix.load import load_matrix
from shim._planning.options import resolve
from shim._planning.plan import make_plan
from shim._releases.detect import detect
from shim._te import features
from shim.testing.patience import patience

REPOSITORY = Path(__file__).resolve().parents[2]


def write_file(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text).lstrip("\n"), "utf-8")
    return path


def version_file(version):
    """package_info.py as megatron-core has it, its run of git included, which nobody may start."""
    numbers, pre = version, ""
    for mark in ("rc", ".dev", "a", "b"):
        if mark in version:
            numbers, _, rest = version.partition(mark)
            pre = mark + rest
    major, minor, patch = numbers.split(".")
    return f"""
        import subprocess
        MAJOR = {major}
        MINOR = {minor}
        PATCH = {patch}
        PRE_RELEASE = {pre!r}
        VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
        __version__ = '.'.join(map(str, VERSION[:3])) + ''.join(VERSION[3:])
        raise RuntimeError("the version file was run")
    """


def megatron(root, version="0.16.0", files=(), *, namespace=True):
    """A source tree with megatron.core below `root`, without metadata; `files` maps paths in megatron/core to text."""
    core = root / "megatron" / "core"
    write_file(core / "__init__.py", "raise RuntimeError('megatron.core was imported')\n")
    if version is not None:
        write_file(core / "package_info.py", version_file(version))
    if not namespace:
        write_file(root / "megatron" / "__init__.py", "raise RuntimeError('megatron was imported')\n")
    for name, text in dict(files).items():
        write_file(core / name, text)
    return root


def metadata(root, version, distribution="megatron-core", direct_url=None):
    """Metadata as an installer writes it."""
    home = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
    write_file(home / "METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if direct_url is not None:
        write_file(home / "direct_url.json", json.dumps(direct_url))
    return home


def run_python(code, *directories, flags=(), env=None):
    """Run `code` in a fresh interpreter with `directories`, then this repository, on PYTHONPATH."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_SHIM_")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (*directories, REPOSITORY))), **(env or {})}
    command = [sys.executable, *flags, "-c", dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=patience())


def output_of(code, *directories, **arguments):
    done = run_python(code, *directories, **arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


BROKEN = """
    def helper(x):
        return x

    def roll(x, shift=-1):
        return helper(x)

    class Layer:
        def forward(self, x):
            return roll(x)
"""
REWORKED = """
    def helper(x):
        return x

    def roll(x, shift=-1, *, dims=None):
        return helper(x)

    class Layer:
        def forward(self, x):
            return roll(x, dims=0)
"""
FIXED = """
    def helper(x):
        return x

    def roll(x, shift=-1, *, dims=None):
        return helper(x) if dims is None else x

    class Layer:
        def forward(self, x):
            return roll(x, dims=0)
"""
SOURCES = {"0.16.0": BROKEN, "0.17.0": REWORKED, "0.18.0": FIXED}
# A patch module for the targets of MATRIX.
PATCH = '''
    """What is wrong: rolls."""

    def bindings(variant, options):
        def wrap(original):
            def roll(x, shift=-1):
                return original(x, shift)
            return roll

        def wrap_forward(original):
            def forward(self, x):
                return original(self, x)
            return forward

        rolls = {"megatron.core.roll:roll": wrap}
        forwards = {"megatron.core.roll:Layer.forward": wrap_forward}
        return {"old": {**rolls, **forwards}, "new": rolls, "only": forwards}[variant]
'''

MATRIX = """\
supported:
  megatron-core: ["0.16.0", "0.17.0", "0.18.0"]

patches:
  roll-fix:
    summary: rolls stay inside their sequence
    kind: correctness
    changes: values
    distribution: megatron-core
    module: trainer_patches.roll_fix
    variants:
      old:
        targets: ["megatron.core.roll:roll", "megatron.core.roll:Layer.forward"]
        reads: ["megatron.core.roll:helper"]
      new:
        targets: ["megatron.core.roll:roll"]
        reads: ["megatron.core.roll:helper"]
    applies:
      - {megatron-core: ">=0.16.0.dev0,<0.17.0.dev0", variant: old}
      - {megatron-core: ">=0.17.0.dev0,<0.18.0.dev0", variant: new}
    upstream:
      - {megatron-core: ">=0.18.0.dev0,<0.19.0.dev0", note: fixed in 0.18}
    delete_when: megatron-core 0.17 is not supported
  faster-forward:
    summary: the same, faster
    kind: performance
    changes: nothing
    distribution: megatron-core
    module: trainer_patches.roll_fix
    variants:
      only:
        targets: ["megatron.core.roll:Layer.forward"]
    applies:
      - {megatron-core: ">=0.16.0.dev0,<0.19.0.dev0", variant: only}
    delete_when: upstream does so
    options: {pages: 4}
"""


class World:
    """Three fake releases of megatron-core, the pinned matrix MATRIX about them, and a place to install one.

    They are read and never imported. fake_world.World has one release that is imported and patched.
    """

    def __init__(self, root, on_path):
        self.root = root
        self.on_path = on_path
        for release, text in SOURCES.items():
            megatron(root / "releases" / release, release, {"roll.py": text})
        self.own = root / "trainer"
        write_file(self.own / "trainer_patches" / "roll_fix.py", '"""What is wrong: rolls."""\n')
        self.site = root / "site"
        self.matrix = root / "matrix.yaml"
        self.pin(MATRIX)

    def pin(self, text):
        """Write `text` as the matrix, pinned on the three releases."""
        self.on_path(self.own)
        self.matrix.write_text(text, "utf-8")
        write_pins(self.matrix, lambda _, release: self.root / "releases" / release)

    def install(self, text, version="0.16.0", **arguments):
        """Put roll.py with `text` on the path, as a source tree that calls itself `version`."""
        files = {} if text is None else {"roll.py": text}
        megatron(self.site, version, files, **arguments)
        self.on_path(self.site, self.own)
        return self

    def plan(self, **arguments):
        matrix = load_matrix(self.matrix)
        return make_plan(detect(), matrix, resolve(matrix, **arguments), features)

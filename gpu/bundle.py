"""What a machine with a GPU and without a network lacks for gpu/run.sh, in gpu/bundle: `make gpu-bundle`.

    python gpu/bundle.py

Everything comes from the package index, through pip. The machine is to have Python 3.12 and torch 2.11.0 for CUDA 13,
with what MACHINE lists, and a GPU of compute capability 9.0. Each archive of a pair is a directory for PYTHONPATH:
megatron-core, and Transformer Engine with its core without kernels for other GPUs and its extension, compiled here.
Downloads, objects and archives stay in the cache, so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import extension
import fatbin

from shim.maintenance.other_torch import Environment, made
from shim.testing.releases import cache_dir, fetch

HERE = Path(__file__).resolve().parent
BUNDLE = HERE / "bundle"
LIMIT = 52 << 20  # with the tree, some 10 MiB, it has to travel in 64
PAIRS = {"0.16.1": "2.11.0", "0.19.2": "2.20.2"}
TORCH, PYTHON, ARCHITECTURE = "2.11.0", "3.12", 90
ENVIRONMENT = Environment(TORCH, PYTHON)
# Of what such a machine has, that which tests and benchmarks use; and headers, which only compiling needs.
MACHINE = [
    *("numpy", "einops", "onnx", "onnxscript", "packaging", "PyYAML", "psutil", "wrapt", "setuptools"),
    *("pytest", "pytest-xdist", "hypothesis", "cuda-toolkit[crt,cccl]==13.0.2"),
]
# What it lacks. Transformer Engine imports pydantic; Liger is one of those that benchmarks compare with.
LACKING = ["pydantic", "pydantic-core", "annotated-types", "typing-inspection", "liger-kernel"]
# Of Transformer Engine's core: what only other frameworks and expert-parallel ranks use.
UNUSED = ("transformer_engine/jax/", "transformer_engine/wheel_lib/nccl_ep/", "transformer_engine/wheel_lib/libnccl_ep")


def bundle(pairs: dict[str, str], say: Callable[[str], None]) -> None:
    """Write the archives into BUNDLE, and manifest.json, which says what is in them."""
    home = cache_dir() / "gpu"
    home.mkdir(parents=True, exist_ok=True)
    say(f"environment of {ENVIRONMENT}")
    python = made(ENVIRONMENT, MACHINE, say)
    archives = {"packages.tar.xz": _packages(home, python, say)}
    for megatron, engine in pairs.items():
        archives[f"{megatron}+{engine}.tar.xz"] = _pair(home, python, megatron, engine, say)
    size = sum(archive.stat().st_size for archive in archives.values())
    if size > LIMIT:
        each = ", ".join(f"{name} {archive.stat().st_size / 2**20:.1f}" for name, archive in archives.items())
        raise SystemExit(f"The bundle has {size / 2**20:.1f} MiB, more than {LIMIT / 2**20:.0f}: {each}.")
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir()
    for name, archive in archives.items():
        shutil.copyfile(archive, BUNDLE / name)
    manifest = {
        "pairs": pairs,
        "torch": TORCH,
        "python": PYTHON,
        "architecture": ARCHITECTURE,
        "archives": {name: hashlib.sha256(each.read_bytes()).hexdigest() for name, each in archives.items()},
    }
    (BUNDLE / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    say(f"gpu/bundle: {size / 2**20:.1f} MiB")


def _packages(home: Path, python: Path, say: Callable[[str], None]) -> Path:
    """The archive of small packages that the machine lacks."""
    archive = home / f"packages-{_digest(LACKING)}.tar.xz"
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            say("packages that the machine lacks")
            target = Path(scratch) / "packages"
            _pip(python, "install", "--no-deps", "--no-compile", "--only-binary=:all:", "--target", target, *LACKING)
            _packed(target, archive)
    return archive


def _pair(home: Path, python: Path, megatron: str, engine: str, say: Callable[[str], None]) -> Path:
    archive = home / f"{megatron}+{engine}-torch-{TORCH}.tar.xz"
    if archive.exists():
        return archive
    library = _extension(home, python, engine, say)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        say(f"megatron-core {megatron} with transformer-engine {engine}: packing")
        site = Path(scratch) / "site"
        _pip(python, "install", "--no-deps", "--no-compile", "--target", site, f"transformer-engine-cu13=={engine}")
        for source in (fetch(megatron, "megatron-core", say), fetch(engine, "transformer-engine", say)):
            shutil.copytree(source, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".complete"))
        sizes = fatbin.keep_only(site / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so", ARCHITECTURE)
        say(f"kernels in MB: {', '.join(f'sm_{arch} {size / 1e6:.0f}' for arch, size in sorted(sizes.items()))}")
        shutil.copyfile(library, site / f"{extension.NAME}.so")
        # Transformer Engine asks for the version of its extension.
        information = site / f"{extension.NAME}-{engine}.dist-info"
        information.mkdir()
        text = f"Metadata-Version: 2.1\nName: {extension.NAME}\nVersion: {engine}\n"
        (information / "METADATA").write_text(text, "utf-8")
        _packed(site, archive)
    return archive


def _extension(home: Path, python: Path, engine: str, say: Callable[[str], None]) -> Path:
    """The compiled extension of a release."""
    name = f"{extension.NAME}-{engine}"
    work = home / f"{name}-torch-{TORCH}"
    sources = work / name
    if not sources.exists():
        say(f"sources of the extension of transformer-engine {engine}")
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            # Its metadata is made by its setup.py, which imports torch.
            made_here = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
            _pip(python, "download", *made_here, "--dest", scratch, f"transformer-engine-torch=={engine}")
            with tarfile.open(Path(scratch) / f"{name}.tar.gz") as packed:
                packed.extractall(work, filter="data")
    return extension.compiled(sources, work / _digest(extension.FLAGS), python, say)


def _packed(site: Path, archive: Path) -> None:
    """Write the archive whole or not at all."""
    partly = archive.with_name(f"{archive.name}.part")

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.startswith(UNUSED) else member

    with tarfile.open(partly, "w:xz", preset=6) as packed:
        for each in sorted(site.iterdir()):
            packed.add(each, each.name, filter=wanted)
    partly.replace(archive)


def _pip(python: Path, *arguments: object) -> None:
    command = [str(python), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    done = subprocess.run([str(each) for each in command], env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} failed:\n{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    """Without what this process imports, which is of another Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _digest(of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:10]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make gpu/bundle, for a machine with a GPU and without a network.")
    parser.add_argument("--pair", action="append", choices=PAIRS, help="megatron-core of a pair; all pairs by default")
    parser.add_argument("--interpreter", action="store_true", help="print the path of the environment's Python")
    arguments = parser.parse_args()
    if arguments.interpreter:
        print(ENVIRONMENT.directory / "bin" / "python")
        return 0
    chosen = arguments.pair or list(PAIRS)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    bundle({megatron: PAIRS[megatron] for megatron in chosen}, say)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"CPU minutes of its children: {(used.ru_utime + used.ru_stime) / 60:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

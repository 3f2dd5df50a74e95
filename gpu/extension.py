"""Transformer Engine's extension for torch, compiled on a machine without CUDA: with g++ and headers from wheels.

An object that was compiled once stays in the cache, so that an interrupted run goes on where it was. What all sources
include is compiled first, which halves the time of each.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

NAME = "transformer_engine_torch"
# -DNVTE_WITH_NCCL_EP is left out: it needs NCCL's library for experts, and no test has ranks that use it.
FLAGS = (
    *("-O2", "-g0", "-w", "-fPIC", "-std=c++17", "-fvisibility=hidden"),
    *("-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={NAME}"),
)
FIRST = "first.h"  # a name that no source includes
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")


def compiled(sources: Path, home: Path, python: Path, say=print) -> Path:
    """The extension of the unpacked source distribution, for the torch of this interpreter; objects lie in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    library = home / f"{NAME}.so"
    if library.exists():
        return library
    site, headers = _places(python)
    include = [f"-I{sources / at}" for at in _OWN]
    for each in (headers, *(site / at for at in _INCLUDE)):
        include += ["-isystem", str(each)]
    flags = [*FLAGS, *include]
    files = sorted((sources / "csrc").rglob("*.cpp"))
    objects = {file: home / f"{'-'.join(file.relative_to(sources / 'csrc').parts)}.o" for file in files}
    missing = [file for file, made in objects.items() if not made.exists()]
    (home / FIRST).write_text(f'#include "{sources}/csrc/common.h"\n', "utf-8")
    first = home / f"{FIRST}.gch"
    for number, file in enumerate(missing):
        if number == 0:
            _run(["g++", *flags, "-x", "c++-header", home / FIRST], first)
        began = time.monotonic()
        _run(["g++", *flags, "-include", home / FIRST, "-c", file], objects[file])
        say(f"compiled {file.name}, {number + 1} of {len(missing)}, in {time.monotonic() - began:.0f} s")
    first.unlink(missing_ok=True)  # some 800 MB
    links = ["-Wl,--no-as-needed", f"-L{site / 'torch' / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    _run(["g++", "-shared", *objects.values(), *links], library)
    return library


# In this order: two files are called common.h.
_OWN = ("common_headers", "common_headers/common", "common_headers/common/include", "csrc")
_INCLUDE = (
    "torch/include",
    "torch/include/torch/csrc/api/include",
    "nvidia/cu13/include",
    "nvidia/cu13/include/cccl",
    "nvidia/cudnn/include",
    "nvidia/nccl/include",
)


def _places(python: Path) -> tuple[Path, Path]:
    """Site-packages and Python's own headers."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib')); print(sysconfig.get_path('include'))"
    site, headers = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    return Path(site), Path(headers)


def _run(command: list, result: Path) -> None:
    """Write `result` whole or not at all. One job at a time, behind all other work."""
    partly = result.with_name(f"{result.name}.part")
    nice = ["nice", "-n", "19"] if shutil.which("nice") else []
    done = subprocess.run([*nice, *map(str, command), "-o", str(partly)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{result.name} could not be made:\n{done.stderr[-3000:]}")
    partly.replace(result)

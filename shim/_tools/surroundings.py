"""The machine and its packages, for `shim doctor`. Imports none of the packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

__all__ = ["TRAINERS", "has_core_library", "machine", "packages"]

TE = "transformer_engine"
PATIENCE = 10  # seconds. nvidia-smi hangs if the driver is broken.

# Distributions, and the names of their packages. First those that change which code of megatron-core runs.
OTHERS: Mapping[str, str] = {
    "triton": "triton",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_3",
    "apex": "apex",
    "megatron-fsdp": "megatron_fsdp",
    "nvidia-cudnn-frontend": "cudnn",
    "nvidia-modelopt": "modelopt",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
    "flash-linear-attention": "fla",
    "grouped-gemm": "grouped_gemm",
    "deep-ep": "deep_ep",
    "nvidia-resiliency-ext": "nvidia_resiliency_ext",
    "torch-npu": "torch_npu",
    "numpy": "numpy",
    "transformers": "transformers",
    "peft": "peft",
    "ray": "ray",
    "vllm": "vllm",
    "sglang": "sglang",
    "wrapt": "wrapt",
}
# Then trainers, which build on megatron-core and patch it themselves.
TRAINERS: Mapping[str, str] = {
    "ms-swift": "swift",
    "mcore-bridge": "mcore_bridge",
    "mbridge": "mbridge",
    "megatron-bridge": "megatron.bridge",
    "verl": "verl",
    "skyrl": "skyrl",
    "skyrl-train": "skyrl_train",
    "slime": "slime",
    "nemo-rl": "nemo_rl",
    "nemo-toolkit": "nemo",
    "mindspeed": "mindspeed",
    "primus": "primus",
}
LIBRARIES = {"nccl": "nvidia-nccl-", "cudnn": "nvidia-cudnn-cu", "cuda runtime": "nvidia-cuda-runtime"}
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nccl/lib")


def machine(torch: str | None) -> dict[str, Any]:
    """The GPUs, the driver, and the versions of CUDA, cuDNN and NCCL. `torch` is the folder of torch, if installed."""
    gpus, driver, problem = _gpus()
    return {
        "gpus": gpus,
        "driver": driver or _driver_of_the_kernel(),
        "cuda": {"torch": _built_for(torch), "toolkit": _toolkit(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")},
        "libraries": _libraries(),
        "problem": problem,
    }


def has_core_library(te: str) -> bool:
    """Whether the core library of Transformer Engine is where its import looks. te: the folder of its package."""
    packages = Path(te).parent, Path(sysconfig.get_paths()["purelib"])
    places = [place for top in packages for place in (top, top / TE, top / TE / "wheel_lib")]
    return any(True for place in places for _ in place.glob("libtransformer_engine.*"))


def _gpus() -> tuple[list[str], str | None, str]:
    """The GPUs with memory and compute capability, the driver, and the problem that kept nvidia-smi from telling."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], None, ""
    query = [command, "--query-gpu=driver_version,name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return [], None, f"nvidia-smi said nothing for {PATIENCE} s: look at the driver (dmesg) before anything else"
    except OSError as error:
        return [], None, f"nvidia-smi cannot be run: {error}"
    if done.returncode:
        return [], None, f"nvidia-smi failed: {(done.stderr or done.stdout).strip() or done.returncode}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [", ".join(row[1:]) for row in rows], rows[0][0] if rows else None, ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _driver_of_the_kernel() -> str | None:
    found = re.search(r"Kernel Module\D*?\s([0-9][0-9.]+)", _read("/proc/driver/nvidia/version"))
    return found and found[1]


def _built_for(torch: str | None) -> str | None:
    """The CUDA (or ROCm) that torch was built for, as its version file says."""
    text = _read(Path(torch, "version.py")) if torch else ""
    found = re.search(r"""^(cuda|hip)\s*(?::[^=\n]*)?=\s*['"]([^'"]+)['"]""", text, re.M)
    return f"{found[1]} {found[2]}" if found else None


def _toolkit() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    try:
        return str(json.loads(_read(Path(home, "version.json")))["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _libraries() -> dict[str, str]:
    """Versions from packages. For NCCL without a package, from the file in the usual library folders."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            # A damaged installation has metadata without a name.
            name = (distribution.metadata["Name"] or "").lower()
        except (OSError, UnicodeError):  # or unreadable metadata
            continue
        for library, prefix in LIBRARIES.items():
            if name.startswith(prefix):
                found[library] = f"{distribution.version} ({name})"
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)), *LIBRARY_FOLDERS]
    for file in (file for folder in folders for file in sorted(Path(folder).glob("libnccl.so.2.*"))):
        found.setdefault("nccl", f"{file.name.removeprefix('libnccl.so.')} ({file})")
    return found


def packages() -> dict[str, dict[str, str | None]]:
    """Version and folder of each known package that is there. A source tree without metadata has no version."""
    found: dict[str, dict[str, str | None]] = {}
    for distribution, package in {**OTHERS, **TRAINERS}.items():
        location = _folder(package)
        try:
            version = metadata.version(distribution)
        except (metadata.PackageNotFoundError, OSError, UnicodeError):
            version = None
        if version is not None or location is not None:
            found[distribution] = {"version": version, "location": location}
    return found


def _folder(package: str) -> str | None:
    """The folder in which an import would find the package. Nothing is imported, not even a parent package."""
    path: list[str] | None = None
    spec = None
    for part in package.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    # A mere folder of that name is no package. The checkout of a trainer may be such a folder.
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None

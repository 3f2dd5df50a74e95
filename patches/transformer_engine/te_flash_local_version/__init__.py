"""FlashAttention 2 of a wheel with a local label, such as 2.8.3+cu12torch2.9.

What is wrong (2.1 to 2.14): Transformer Engine takes FlashAttention 2 up to a version that it names, and compares with
the label of the wheel. 2.8.3+cu12torch2.9 is above 2.8.3, so FlashAttention 2 counts as not installed if it is just the
newest that is allowed: 2.7.4.post1 up to Transformer Engine 2.5, 2.8.1 up to 2.9, 2.8.3 from 2.10 on. Wheels that are
built for one torch have such labels. Attention then takes another backend, or none: packed rows raise an error if
cuDNN cannot run them and unfused attention does not take them.

The patch: when Transformer Engine is asked for a backend, a FlashAttention 2 that is refused for its label alone is
imported and entered where Transformer Engine's own import enters it, by its version without the label. Both orders of
import work. Other versions, which backend is preferred, and a FlashAttention 2 that cannot be imported stay as on
stock; the logger shim then names the error. shim.revert() takes all of it back.

- Transformer Engine has warned of the version when it was imported. The warning is wrong then.
- It remembers its choice. Apply before the first attention.

Upstream: pull request 2858 (in 2.15) compares without the label, 3356 (in 2.19) below 2.8.4.

Delete when: Transformer Engine 2.14 is not supported.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from packaging.version import Version

from shim._resources import Bindings, Resource
from shim.patches._arguments import Function

log = logging.getLogger("shim")

PACKAGE = "transformer_engine.pytorch."
V2_3 = PACKAGE + "attention.dot_product_attention."
INTERFACE = "flash_attn.flash_attn_interface"
# Transformer Engine's name of a function -> the module and the name that FlashAttention 2 has for it.
FUNCTIONS = {
    "flash_attn_cuda_bwd": ("flash_attn_2_cuda", "varlen_bwd"),
    "flash_attn_func": (INTERFACE, "flash_attn_func"),
    "flash_attn_varlen_func": (INTERFACE, "flash_attn_varlen_func"),
    "_flash_attn_fwd": (INTERFACE, "_flash_attn_forward"),
    "_flash_attn_bwd": (INTERFACE, "_flash_attn_backward"),
    "_flash_attn_varlen_fwd": (INTERFACE, "_flash_attn_varlen_forward"),
    "_flash_attn_varlen_bwd": (INTERFACE, "_flash_attn_varlen_backward"),
}


class Home(NamedTuple):
    """The modules of one variant: of get_attention_backend, of the functions, and of the backends in use."""

    chooses: str
    functions: str
    in_use: str


HOMES = {
    "v2_0": Home(*[PACKAGE + "attention"] * 3),
    "v2_2": Home(PACKAGE + "dot_product_attention.utils", *[PACKAGE + "attention"] * 2),
    "v2_3": Home(*(V2_3 + name for name in ("utils", "backends", "dot_product_attention"))),
}


class Refused:
    """The FlashAttention 2 that Transformer Engine refuses for its label alone, from its first use to `release`."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._seen: Version | None = None  # the version that Transformer Engine had when it was asked the last time
        self._version: Version | None = None
        self._written: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there

    def enter(self) -> None:
        """Enter it into Transformer Engine, once for each import, if it is refused for its label alone."""
        owner, prefix = self._found()
        version = getattr(owner, f"{prefix}version")
        if version is self._seen:
            return
        with self._lock:
            self._seen = version
            if getattr(owner, f"{prefix}is_installed") or not self._refused(owner, prefix, version):
                return
            try:
                functions = {name: getattr(import_module(at), its) for name, (at, its) in FUNCTIONS.items()}
            except (ImportError, AttributeError) as error:
                log.warning("te-flash-local-version: FlashAttention %s cannot be imported: %s", version, error)
                return
            self._version, self._seen = version, Version(version.public)
            home = sys.modules[self._home.functions]
            for name, function in functions.items():
                self._write(home, name, function)
            self._write(owner, f"{prefix}version", self._seen)
            for name, since in self._steps(owner, prefix):
                self._write(owner, name, self._seen >= since)
            self._write(owner, f"{prefix}is_installed", True)

    def _found(self) -> tuple[Any, str]:
        """What has Transformer Engine's findings about FlashAttention 2, and how their names begin."""
        module = sys.modules[self._home.chooses]
        utils = getattr(module, "FlashAttentionUtils", None)  # from 2.2
        return (module, "_flash_attn_") if utils is None else (utils, "")

    def _refused(self, owner: Any, prefix: str, version: Version) -> bool:
        capability = sys.modules[PACKAGE + "utils"].get_device_compute_capability()
        least = "version_required_blackwell" if capability >= (10, 0) else "version_required"
        allowed = getattr(owner, prefix + least) <= Version(version.public) <= getattr(owner, f"{prefix}max_version")
        return version.local is not None and allowed

    def _steps(self, owner: Any, prefix: str) -> list[tuple[str, Version]]:
        """The flags that say that FlashAttention is at least of some version: v2_7_0_plus, say."""
        begin = f"{prefix}2_" if prefix else "v2_"
        flags = [name for name in vars(owner) if name.startswith(begin) and name.endswith("plus")]
        return [(name, Version("2." + name[len(begin) : -len("plus")].replace("_", ".") + "0")) for name in flags]

    def _write(self, owner: Any, name: str, value: Any) -> None:
        self._written.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)

    def held(self) -> str:
        return f"FlashAttention {self._version} in Transformer Engine's attention" if self._written else ""

    def release(self) -> None:
        """Put back what was there, and have Transformer Engine choose again."""
        with self._lock:
            for owner, name, before, written in reversed(self._written):
                if getattr(owner, name, None) is written:
                    setattr(owner, name, before)
            if self._written:
                in_use = sys.modules[self._home.in_use]._attention_backends
                in_use["backend_selection_requires_update"] = True
            self._written.clear()
            self._seen = None


def _get_attention_backend(original: Function, refused: Refused) -> Function:
    @functools.wraps(original)
    def get_attention_backend(*args: Any, **kwargs: Any) -> Any:
        refused.enter()
        return original(*args, **kwargs)

    return get_attention_backend


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    home = HOMES[variant]
    refused = Refused(home)
    factory = functools.partial(_get_attention_backend, refused=refused)
    return Bindings({f"{home.chooses}:get_attention_backend": factory}, Resource(refused.held, refused.release))

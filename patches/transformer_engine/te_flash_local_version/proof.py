"""Proof of te-flash-local-version: Transformer Engine's own import, with a FlashAttention that is not there.

A module with functions that compute nothing stands for FlashAttention 2, and importlib.metadata gives its version. The
import of Transformer Engine's module that compares it runs again, and then its own get_attention_backend is asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from shim.patches.transformer_engine._proof_flash_attention import chosen, home, there
from shim.testing.proof import Here, proof
from shim.testing.transformer_engine import te_cuda_stand_ins

LABEL = "cu12torch2.9"
HOPPER, BLACKWELL = (9, 0), (10, 0)
PACKAGE = "transformer_engine.pytorch."
IMPORTERS = ("attention.dot_product_attention.backends", "attention")  # from 2.3, and before
NAMES = ("flash_attn_func", "flash_attn_varlen_func", "_flash_attn_forward", "_flash_attn_backward",
         "_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "varlen_bwd")  # fmt: skip
PACKED: dict[str, Any] = {
    "qkv_layout": "thd_thd_thd",
    "attn_mask_type": "padding_causal",
    "head_dim_qk": 64,
    "head_dim_v": 64,
}


def importer() -> Any:
    """The module of Transformer Engine that imports FlashAttention 2."""
    home()
    return import_module(PACKAGE + next(name for name in IMPORTERS if there(PACKAGE + name)))


def newest_allowed() -> str:
    """The newest version of FlashAttention 2 that the installed Transformer Engine takes: "2.8.3", say."""
    utils = getattr(home(), "FlashAttentionUtils", None)
    newest = str(home()._flash_attn_max_version if utils is None else utils.max_version)
    return "2.8.3" if newest == "2.8.4" else newest  # from 2.19 that is the first which it does not take


def flash_attn() -> dict[str, ModuleType]:
    """Modules with FlashAttention's functions, which compute nothing."""
    names = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda")
    modules = {name: ModuleType(name) for name in names}
    for name in NAMES:
        for module in modules.values():
            setattr(module, name, lambda *args, name=name, **kwargs: name)
    return modules


@contextlib.contextmanager
def imported_with(version: str, capability: tuple[int, int] = HOPPER) -> Iterator[Any]:
    """Transformer Engine as it is after an import on such a GPU beside this version of FlashAttention 2."""
    module, asked = importer(), importlib.metadata.version
    utils = getattr(home(), "FlashAttentionUtils", None)
    kept = [(owner, dict(vars(owner))) for owner in (module, utils) if owner is not None]

    def version_of(name: str) -> str:
        return version if name == "flash-attn" else asked(name)

    def restore() -> None:
        for owner, before in kept:
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)

    with contextlib.ExitStack() as undo:
        undo.callback(restore)
        undo.enter_context(te_cuda_stand_ins(capability))
        undo.enter_context(mock.patch.dict(sys.modules, flash_attn()))
        undo.enter_context(mock.patch.object(importlib.metadata, "version", version_of))
        undo.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        if utils is not None:
            utils.is_installed = False
        importlib.reload(module)
        yield module


def takes_flash(version: str, capability: tuple[int, int] = HOPPER) -> bool:
    """Whether packed rows get FlashAttention if this version is installed."""
    with imported_with(version, capability):
        return bool(chosen(capability, flash=False, **PACKED)[0])


@proof("FlashAttention 2 refused on {:.0f} of 2 GPUs", right="FlashAttention 2 on both", defect="memory", te=True)
def a_wheel_with_a_local_label(here: Here) -> int:
    """Transformer Engine takes FlashAttention 2 for not installed if its wheel has a local label.

    To reproduce: install a FlashAttention wheel whose version has a label, such as 2.8.3+cu12torch2.9 with Transformer
    Engine 2.10 to 2.14.1, and run `DotProductAttention` under NVTE_DEBUG=1: FlashAttention 2 is off, and a warning says
    "Supported flash-attn versions are >= 2.1.1, <= 2.8.3. Found flash-attn 2.8.3+cu12torch2.9". Here stand-ins say that
    FlashAttention and a GPU of compute capability 9.0 or 10.0 are there, and the import runs again.

    The import compares the whole version with the largest allowed, and PEP 440 puts a label above it. Right is the
    version without the label. Pull request 2858 fixed it in 2.15.
    """
    version = f"{newest_allowed()}+{LABEL}"
    return sum(not here.run(takes_flash, version, capability)[0] for capability in (HOPPER, BLACKWELL))

"""Compile the Triton kernels of shim for NVIDIA devices, without one, and read what they take of a multiprocessor.

    python tests/support/compiled_kernels.py [CAPABILITY ...]

The launches are those of shim's own functions, on tensors without memory, so the signatures are those of real calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CAPABILITIES = (80, 90, 100, 120)
THREADS = 32  # of a warp
REGISTERS = 65536  # of a multiprocessor
# A row of tokens and a vocabulary as large as any model has.
TOKENS, VOCABULARY = 131_072, 262_144
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass
class Launch:
    """A launch: the kernel, its grid, what each argument is, and the options of the compiler."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]

    def signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
        """(type of each argument, constants, what is divisible by 16), by Triton's rules of specialization."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or (free and type(value) is int and value == 1):
                types[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            types[parameter.name] = _type_of(value)
            address = value.storage_offset() * value.itemsize if isinstance(value, Tensor) else value
            if free and not isinstance(value, float) and address % 16 == 0:
                divisible[(place,)] = [["tt.divisibility", 16]]
        return types, constants, divisible


@dataclass
class Usage:
    """What one program of a kernel takes. spilled: bytes of local memory for each thread."""

    registers: int
    spilled: int
    shared: int
    threads: int


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are noted, and nothing runs."""
    compiled: Any = import_module("triton.runtime.jit").JITFunction
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        options = {name: value for name, value in kwargs.items() if name not in names}
        found.append(Launch(kernel.fn.__name__, kernel, grid, given, options))

    with mock.patch.object(compiled, "run", run):
        yield found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of_logits(tokens: int, columns: int, dtype: torch.dtype, every: bool, strided: bool = False) -> None:
    """Both passes of log-probabilities; every: with all that they can do."""
    from shim.ops import _logprob_triton as kernels
    from shim.ops._logprob_chunks import RowGradient

    x = empty(columns, tokens, dtype=dtype).t() if strided else empty(tokens, columns, dtype=dtype)
    place = empty(tokens, dtype=torch.int64)
    ignored = empty(tokens, dtype=torch.bool) if every else None
    scale = empty(tokens) if every else 1.0
    column = empty(tokens, dtype=torch.int64) if every else None
    kernels.statistics(x, place, scale, entropy=every, total=every, ignored=ignored, column=column)
    of_row = [empty(tokens) if every else None] * 2
    row = RowGradient(empty(tokens), empty(tokens), *of_row, empty(tokens))
    kernels.gradient(x, empty(*x.shape, dtype=dtype), place, scale, row, ignored=ignored)


def of_stash(rows: int, width: int, dtype: torch.dtype, placed: bool, strided: bool = False) -> None:
    """All operations of a page pool."""
    from shim.ops import _stash_triton as kernels
    from shim.ops._stash_pool import BITS

    lists = {name: empty(8, dtype=torch.int64) for name in ("state", "ring", "host_ring")}
    data = {name: empty(rows, width, dtype=BITS[dtype.itemsize]) for name in ("data", "host_data")}
    pool: Any = SimpleNamespace(**lists, **data, pages=rows // 64, host_pages=rows // 64, page_size=64)
    place = empty(rows, dtype=torch.int64) if placed else None
    of_rows: Any = SimpleNamespace(rows=rows, count=empty(1, dtype=torch.int64), place=place)
    tensor = empty(rows, width, dtype=BITS[dtype.itemsize])
    if strided:
        tensor = empty(width, rows, dtype=BITS[dtype.itemsize]).t()
    pages, where = empty(rows // 64, dtype=torch.int64), empty(1, dtype=torch.int64)
    kernels.allocate(pool, of_rows.count, pages, where, kept=True)
    kernels.store(pool, tensor, of_rows, pages, where)
    kernels.load(pool, tensor, of_rows, pages, where)
    kernels.release(pool, of_rows.count, pages, where)


# What is compiled: sizes of a model, its largest, and the shapes that kernels treat in another way.
CALLS: Mapping[str, Callable[[], None]] = {
    "bf16": lambda: of_logits(TOKENS, VOCABULARY, torch.bfloat16, every=False),
    "bf16, everything": lambda: of_logits(TOKENS, VOCABULARY, torch.bfloat16, every=True),
    "fp32, everything": lambda: of_logits(8192, 151_936 // 8, torch.float32, every=True),
    "fp16": lambda: of_logits(8192, 32_000, torch.float16, every=False),
    "few columns": lambda: of_logits(64, 17, torch.bfloat16, every=True),
    "columns first": lambda: of_logits(64, 32_000, torch.bfloat16, every=False, strided=True),
    "stash, bf16": lambda: of_stash(16_384, 4096, torch.bfloat16, placed=False),
    "stash, by a mask": lambda: of_stash(16_384, 4096, torch.float32, placed=True),
    "stash, columns first": lambda: of_stash(4096, 20, torch.bfloat16, placed=False, strided=True),
    "stash, one byte": lambda: of_stash(4096, 33, torch.uint8, placed=True),
}


def launches_of(name: str) -> list[Launch]:
    with recorded() as found:
        CALLS[name]()
    return found


def usage_of(launch: Launch, capability: int) -> Usage:
    """What the kernel takes after it has been compiled for devices of this capability."""
    target = import_module("triton.backends.compiler").GPUTarget("cuda", capability, THREADS)
    compiler: Any = import_module("triton.compiler")
    types, constants, divisible = launch.signature()
    source = compiler.ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=divisible)
    made = compiler.compile(source, target=target, options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [_tool("cuobjdump"), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", shown)
    assert taken is not None, shown
    registers, stack, _, local = map(int, taken.groups())
    threads = THREADS * launch.options["num_warps"]
    return Usage(registers, stack + local, made.metadata.shared, threads)


def _tool(name: str) -> str:
    import triton

    return os.fspath(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def main() -> None:
    """A line of JSON for each kernel, call and capability."""
    for call in CALLS:
        for launch in launches_of(call):
            for capability in [int(word) for word in sys.argv[1:]] or CAPABILITIES:
                used = vars(usage_of(launch, capability))
                print(json.dumps({"kernel": launch.name, "call": call, "capability": capability, **used}), flush=True)


if __name__ == "__main__":
    main()

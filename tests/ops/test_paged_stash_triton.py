"""The kernels of the paged stash: their tests in Triton's interpreter, and that they compile for a device."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

COMPILE = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shim.ops import _stash_triton as kernels

NUMBERS = ("capacity", "host_capacity", "page_size", "slots", "refused", "rows", "width", "row_stride", "column_stride")
WORDS = ("tensor", "data", "host_data")

def ptx_of(kernel, word="i64", **constants):
    types = {**dict.fromkeys(NUMBERS, "i32"), **dict.fromkeys(WORDS, "*" + word)}
    types.update(dict.fromkeys(constants, "constexpr"))
    signature = {name: types.get(name, "*i64") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" and name not in kernels._VARYING
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

for kernel in (kernels._allocate_kernel, kernels._release_kernel):
    assert "bar.sync" in ptx_of(kernel, BLOCK=kernels._SLOTS)
for every in (False, True):
    chosen = {"LOADS": every, "PLACED": every, "PAGE_SIZE": 64}
    for shape in ((1, 2048), (1024, 2)):
        ptx = ptx_of(kernels._copy_kernel, UNIT=2, ROWS=shape[0], COLUMNS=shape[1], column_stride=1, **chosen)
        print("words", *sorted(set(re.findall(r"(?:ld|st)\\.global\\S*v\\d\\S*", ptx))))
    ptx_of(kernels._copy_kernel, word="i8", UNIT=1, ROWS=64, COLUMNS=64, row_stride=1, **chosen)
"""

ON_CPU = """
import torch
from shim.ops import _stash_triton
_stash_triton.check_device(torch.device("cuda"))
_stash_triton.check_device(torch.device("cpu"))
"""


def test_in_the_interpreter_they_do_as_the_reference_does(run_python):
    # The interpreter decides at the import of Triton.
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/paged_stash_kernels.py"), TRITON_INTERPRET="1"
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


def test_they_compile_for_a_device_and_copy_sixteen_bytes_at_a_time(lines_of_compiling):
    lines = [line for line in lines_of_compiling(COMPILE) if line.startswith("words")]
    assert len(lines) == 4
    for line in lines:
        for access in ("ld", "st"):
            assert re.search(access + r"\.global\S*\.v(2\.[bu]64|4\.[bu]32)", line), line


def test_on_cpu_they_need_the_interpreter_and_say_so(run_python):
    done = run_python("-W", "ignore", "-c", ON_CPU, TRITON_INTERPRET="0")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError") and "TRITON_INTERPRET=1" in last, done.stderr

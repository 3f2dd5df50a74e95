"""The kernels: the tests of the chunks once more in Triton's interpreter, and that they compile for a device."""

import re

import pytest
from thorough import times

pytest.importorskip("torch")
pytest.importorskip("triton")

# The tests of the chunks, and of the tiles of the linear form: first what kernels compute, then who may read it.
NAMES = ("logprob", "linear_largest", "logprob_memory", "logprob_in_place", "linear_logprob")[: times(2, 5)]
PARTS = [f"tests/ops/test_{name}.py" for name in NAMES]
COMPILE = """
import re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shim.ops import _logprob_triton as kernels

TYPES = {"place": "*i64", "top_columns": "*i64", "ignored": "*i8", "scale": "fp32"}
for kernel in (kernels._statistics_kernel, kernels._gradient_kernel):
    for every in (False, True):
        constants, signature, aligned = {"BLOCK": 4096, "column_stride": 1, "out_column_stride": 1}, {}, {}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        for place, name in enumerate(kernel.arg_names):
            if name in constants or name.isupper():
                constants.setdefault(name, every)
                signature[name] = "constexpr"
                continue
            integer = name in ("tokens", "columns", "row_stride", "out_row_stride")
            signature[name] = TYPES.get(name, "i32" if integer else "*bf16" if name in ("x", "out") else "*fp32")
            if name != "scale":
                aligned[place,] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, aligned)
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        print(kernel.__name__, *sorted(set(re.findall(r"(?:ld|st)\\.global\\S*v4\\S*|cvt\\.\\S*bf16\\.f32", ptx))))
"""


def test_in_the_interpreter_they_pass_the_tests_of_the_chunks(run_python):
    # The interpreter decides at the import of Triton, copies what kernels are given, and keeps it: this measures no
    # memory, and logits that it still holds can be read.
    chosen = "not peak and not measure and not compiled and not arguments and not same_bits_every and not saved_are"
    chosen += " and not nobody_can_read"
    chosen += times(" and not no_worse", "")
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *PARTS),
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > times(50, 90)


def test_they_compile_for_a_device_with_wide_loads_and_rounding_to_nearest(lines_of_compiling):
    lines = lines_of_compiling(COMPILE)
    assert len(lines) == 4
    for line in lines:
        assert "ld.global.v4.b32" in line
        if line.startswith("_gradient_kernel"):
            assert "st.global.v4.b32" in line and "cvt.rn.bf16" in line

"""Every Triton kernel compiles for each kind of NVIDIA device, without spilling, and can count as far as it must."""

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed, so no kernel is compiled")

import compiled_kernels  # noqa: E402
from thorough import in_full  # noqa: E402

SUPPORT = Path(compiled_kernels.__file__).parent
GRID = (2**31 - 1, 65535, 65535)  # the largest that CUDA takes
SPILLING = """
import compiled_kernels as kernels
launch = kernels.launches_of("bf16, everything")[0]
launch.options = dict(launch.options, maxnreg=24)
print(kernels.usage_of(launch, 90).spilled)
"""


def lines(monkeypatch, run_python, tmp_path, *command):
    monkeypatch.setenv("PYTHONPATH", os.fspath(SUPPORT))
    done = run_python("-W", "ignore", *command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=os.fspath(tmp_path))
    if "0 active drivers" in done.stderr or "No module named 'triton.backends" in done.stderr:
        pytest.skip("this Triton has no compiler for NVIDIA devices")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=() if each == 90 else in_full) for each in compiled_kernels.CAPABILITIES],
)
def test_they_compile_without_spilling(capability, monkeypatch, run_python, tmp_path):
    program = os.fspath(SUPPORT / "compiled_kernels.py")
    found = [json.loads(line) for line in lines(monkeypatch, run_python, tmp_path, program, str(capability))]
    kernels = {"_statistics_kernel", "_gradient_kernel", "_allocate_kernel", "_copy_kernel", "_release_kernel"}
    assert {each["kernel"] for each in found} == kernels
    assert [each for each in found if each["spilled"]] == []
    assert [each for each in found if each["registers"] * each["threads"] > compiled_kernels.REGISTERS] == []
    assert all(each["registers"] for each in found)


def test_a_kernel_that_spills_is_seen(monkeypatch, run_python, tmp_path):
    (spilled,) = lines(monkeypatch, run_python, tmp_path, "-c", SPILLING)
    assert int(spilled) > 0


@pytest.fixture
def launches():
    return [launch for name in compiled_kernels.CALLS for launch in compiled_kernels.launches_of(name)]


def test_the_largest_row_of_tokens_and_vocabulary_fits_a_launch(launches):
    sizes = compiled_kernels.TOKENS * compiled_kernels.VOCABULARY
    assert sizes > 2**31
    for launch in launches:
        assert len(launch.grid) <= 3 and all(0 < size <= most for size, most in zip(launch.grid, GRID))
        for name, value in launch.arguments.items():
            assert not isinstance(value, int) or value < 2**31, f"{name} of {launch.name}"
    of_rows = {launch.name: launch.grid for launch in compiled_kernels.launches_of("bf16")}
    blocks = compiled_kernels.VOCABULARY // 4096
    assert of_rows == {
        "_statistics_kernel": (compiled_kernels.TOKENS,),
        "_gradient_kernel": (compiled_kernels.TOKENS, blocks),
    }


BEYOND = """
import torch
from shim.ops import _logprob_triton as triton_passes, _logprob_chunks as chunks

# Two rows that begin {apart} elements apart; only their pages of the memory are ever touched.
columns, apart = 64, {apart}
memory = torch.empty(apart + columns, dtype=torch.bfloat16)
x = memory.as_strided((2, columns), (apart, 1))
x.copy_(torch.randn(2, columns, generator=torch.Generator().manual_seed(0)))
near = x.clone()
out = torch.empty(apart + columns, dtype=torch.bfloat16).as_strided((2, columns), (apart, 1))
place = torch.tensor([3, 5])
options = dict(entropy=True, total=True, ignored=None)
found, right = (triton_passes.statistics(each, place, 1.0, **options) for each in (x, near))
assert torch.equal(found, right), (found, right)
row = chunks.RowGradient(right[0], torch.ones(2), None, None, torch.ones(2))
to = torch.empty_like(near)
triton_passes.gradient(x, out, place, 1.0, row, ignored=None)
triton_passes.gradient(near, to, place, 1.0, row, ignored=None)
assert torch.equal(out, to), (out, to)
print("same")
"""
STASHED = """
import torch
from shim.ops import PagedStash, _stash_triton as kernels
from types import SimpleNamespace

width, apart = 16, {apart}
memory = torch.empty(apart + width, dtype=torch.int8)
tensor = memory.as_strided((2, width), (apart, 1))
tensor.copy_(torch.arange(32).view(2, width))
zeros = lambda size: torch.zeros(size, dtype=torch.int64)
pool = SimpleNamespace(state=zeros(16), ring=torch.arange(2), host_ring=zeros(1), pages=2, host_pages=0, page_size=1,
                       data=torch.zeros(4, width, dtype=torch.int8), host_data=torch.zeros(1, width, dtype=torch.int8))
pool.state[1] = 2  # free pages end there
rows = SimpleNamespace(rows=2, count=torch.tensor([2]), place=None)
pages, where = zeros(2), zeros(1)
kernels.allocate(pool, rows.count, pages, where, kept=True)
kernels.store(pool, tensor, rows, pages, where)
assert sorted(pool.data[:2].flatten().tolist()) == list(range(32)), pool.data
out = torch.empty(apart + width, dtype=torch.int8).as_strided((2, width), (apart, 1))
kernels.load(pool, out, rows, pages, where)
assert torch.equal(out, tensor)
print("same")
"""


@pytest.mark.parametrize("program", [BEYOND, STASHED], ids=["log-probabilities", "stash"])
def test_rows_beyond_32_bits_are_found(program, run_python):
    done = run_python("-W", "ignore", "-c", program.format(apart=2**31 + 32), TRITON_INTERPRET="1")
    assert done.stdout.split() == ["same"], done.stderr[-3000:]

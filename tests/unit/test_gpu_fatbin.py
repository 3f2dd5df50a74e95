"""Kernels of other GPUs are taken out of a library; on a small ELF file that is made here."""

import struct

import fatbin
import pytest

HEADER = 64


def entry(architecture, payload, header=HEADER, kind=2):
    """As CUDA has it: kind, version, size of the header, size of the payload, and at 28 the architecture."""
    head = struct.pack("<HHIQIIII", kind, 257, header, len(payload), 0, 0, 0, architecture)
    return head.ljust(header, b"h") + payload


def container(*entries):
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def library(kernels, name=b".nv_fatbin"):
    """A 64-bit ELF file with two sections: the names, and the kernels."""
    names = b"\0.names\0" + name + b"\0"
    at_names, at_kernels = 64, 64 + 32
    table = at_kernels + len(kernels)
    head = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", table)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 2, 0)
    sections = [(1, at_names, len(names)), (8, at_kernels, len(kernels))]
    rows = [struct.pack("<I20xQQ", *section).ljust(64, b"\0") for section in sections]
    return head.ljust(at_names, b"\0") + names.ljust(32, b"\0") + kernels + b"".join(rows)


@pytest.fixture
def file(tmp_path):
    def made(content):
        path = tmp_path / "library.so"
        path.write_bytes(content)
        return path

    return made


def test_all_but_the_machine_code_of_one_architecture_is_zeros(file):
    def kernels(of_80, ptx, of_120):
        first = container(entry(80, of_80), entry(90, b"W" * 24, 112), entry(90, ptx, 80, kind=1))
        return library(first + bytes(8) + container(entry(120, of_120, 104)))

    path = file(kernels(b"a" * 16, b"p" * 32, b"b" * 40))
    assert fatbin.keep_only(path, 90) == {80: 16, 90: 24, 120: 40}
    assert path.read_bytes() == kernels(bytes(16), bytes(32), bytes(40))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (library(container(entry(80, b"a" * 16))), "no kernels for sm_90, only for [80]"),
        (library(container(entry(90, b"p" * 16, kind=1))), "no kernels for sm_90"),
        (library(b"x" * 32), "no container of kernels at 0x60"),
        (library(container(entry(90, b"W" * 16), entry(80, b"a" * 16)[:-8])), "no entry of a container"),
        (library(container(entry(90, b"W" * 16))[:-8]), "no container of kernels"),
        (library(container(entry(90, b"W" * 16)), b".data"), "no section .nv_fatbin"),
        (b"MZ" + bytes(100), "no 64-bit ELF file"),
    ],
)
def test_a_file_that_looks_otherwise_stays_as_it_was(file, content, said):
    path = file(content)
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        fatbin.keep_only(path, 90)
    assert path.read_bytes() == content

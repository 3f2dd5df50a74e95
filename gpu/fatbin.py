"""Takes the kernels of other GPUs out of a CUDA library, so that it packs small.

A library keeps its kernels in the section .nv_fatbin: one container after another, each with an entry for every
architecture, as machine code or as PTX, from which the driver makes some for a card that came later. The payloads of
unwanted entries become zeros, and those of all PTX. Headers, sizes and addresses stay, so the driver finds the
entry of its own architecture as before.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SECTION = ".nv_fatbin"
# Magic number, version, size of this header, size of the entries behind it.
CONTAINER = struct.Struct("<IHHQ")
MAGIC, VERSION = 0xBA55ED50, 1
MACHINE_CODE = 2
# Kind, size of the entry's header, size of the payload behind it; at 28 the architecture.
ENTRY = struct.Struct("<HxxIQ12xI")


def keep_only(library: Path, architecture: int) -> dict[int, int]:
    """Zero all payloads but the machine code of this architecture, in the file. Returns the bytes of machine code that
    it had for each.

    Raises ValueError, and leaves the file as it was, if it does not look as described or lacks the architecture.
    """
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        start, size = _section(data, SECTION)
        found = list(_payloads(data, start, start + size))
        sizes: Counter[int] = Counter()
        for kind, arch, _, length in found:
            sizes[arch] += length if kind == MACHINE_CODE else 0
        if not sizes[architecture]:
            raise ValueError(f"{library.name} has no kernels for sm_{architecture}, only for {sorted(sizes)}.")
        for kind, arch, offset, length in found:
            if (kind, arch) != (MACHINE_CODE, architecture):
                data[offset : offset + length] = bytes(length)
    return dict(sizes)


def _payloads(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and length of each payload."""
    while at < end:
        if data[at : at + 8] == bytes(8):  # containers are aligned
            at += 8
            continue
        magic, version, header, size = CONTAINER.unpack_from(data, at)
        if (magic, version) != (MAGIC, VERSION) or at + header + size > end:
            raise ValueError(f"no container of kernels at {at:#x} of {SECTION}: {magic:#x}, version {version}")
        at += header
        stop = at + size
        while at < stop:
            kind, header, length, arch = ENTRY.unpack_from(data, at)
            if header < ENTRY.size or at + header + length > stop:
                raise ValueError(f"no entry of a container of kernels at {at:#x}: {header} and {length} bytes")
            yield kind, arch, at + header, length
            at += header + length


def _section(data: mmap.mmap, wanted: str) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    width, count, names = struct.unpack_from("<HHH", data, 0x3A)
    # Name, then from 24 on: offset, size.
    sections = [struct.unpack_from("<I20xQQ", data, table + number * width) for number in range(count)]
    for name, offset, size in sections:
        at = sections[names][1] + name
        if data[at : data.find(b"\0", at)] == wanted.encode():
            return offset, size
    raise ValueError(f"no section {wanted}")

"""Whether the byte code that an import runs was made from the source beside it."""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from shim._engine.aliases import namespace_of

__all__ = ["stale_bytecode"]

_HEADER = 16  # bytes: magic, flags, and either time and size of the source, or its hash
_SETTLED = 2_000_000_000  # ns


def stale_bytecode(module: ModuleType) -> str:
    """The file of byte code that an import of `module` runs although another source made it. "" if there is none.

    Python itself compares the time and size of the source, or nothing. An unchecked hash is compared here. A source
    that was changed after its byte code was written, and kept its time and size, is compiled and compared.
    """
    spec = namespace_of(module).get("__spec__")
    loader, cached, origin = getattr(spec, "loader", None), getattr(spec, "cached", None), getattr(spec, "origin", None)
    if not isinstance(loader, SourceFileLoader) or not cached or not origin:
        return ""
    try:
        with open(cached, "rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER or header[:4] != importlib.util.MAGIC_NUMBER:
                return ""
            flags = int.from_bytes(header[4:8], "little")
            if flags == 0:
                source, code = os.stat(origin), os.fstat(file.fileno())
                same = (source.st_mtime.__trunc__() & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
                runs = same == (int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little"))
                if not runs or source.st_ctime_ns <= code.st_ctime_ns + _SETTLED:
                    return ""
                return "" if _made_from(origin, file.read()) else cached
        if flags != 1 or _checks_all():
            return ""  # Python compares, or knows no such flags
        with open(origin, "rb") as file:
            made_from = importlib.util.source_hash(file.read())
        return "" if made_from == header[8:] else cached
    except OSError:
        return ""


def _checks_all() -> bool:
    return getattr(sys.modules.get("_imp"), "check_hash_based_pycs", "default") == "always"


def _made_from(origin: str, code: bytes) -> bool:
    with open(origin, "rb") as file:
        source = file.read()
    try:
        found: object = compile(source, origin, "exec", dont_inherit=True)
        return bool(found == marshal.loads(code))
    except (SyntaxError, ValueError, EOFError, TypeError):
        return False

"""What byte code reads: the names of globals, closures and locals, the attributes of them, and imports.

Byte code is what runs. The text of a function may be gone, or another by now, and names in decorators and defaults
are not calls.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["Read", "attributes_in", "is_attribute", "reads_first", "reads_of"]

# How a path begins ("global", "closure", "local", "import", "super", or "" for the result of an expression), the name
# there (none after "super" and ""), and the attributes that follow; of "import" the module and the name in it.
Read = tuple[str, ...]


@functools.lru_cache(maxsize=256)  # by the code and not by the function, whose closure could keep a model alive
def reads_of(code: types.CodeType | None) -> tuple[Read, ...]:
    """The paths that code reads, with the functions defined in it. Each path comes after those that it begins with."""
    if code is None:
        return ()
    inner = [reads_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys(sum(inner, _own_reads_of(code))))


def is_attribute(read: Read) -> bool:
    """Whether a path ends with an attribute."""
    return read[0] != "import" and len(read) > (1 if read[0] in ("", "super") else 2)


def attributes_in(reads: Sequence[Read]) -> frozenset[str]:
    """The attributes that code reads."""
    return frozenset(read[-1] for read in reads if is_attribute(read))


def reads_first(code: types.CodeType) -> bool:
    """Whether code reads its first parameter."""
    known = [read[1] for read in _own_reads_of(code) if read[0] in ("local", "closure")]
    return code.co_argcount > 0 and code.co_varnames[0] in known


_CALLS = ("CALL", "CALL_FUNCTION", "CALL_FUNCTION_EX", "CALL_KW")
_BETWEEN = ("PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE", "NOP", "COPY_FREE_VARS")  # change no value on the stack


def _own_reads_of(code: types.CodeType) -> tuple[Read, ...]:
    found: list[Read] = []
    path: Read = ()  # of the value on the top of the stack
    module = ""  # that an import statement names
    in_super = False  # between `super` and the call of it
    level: Any = 0
    earlier: tuple[Any, Any] = (0, 0)  # the arguments of the two steps before: of an import, its level and its names
    for step in dis.get_instructions(code):
        operation, argument = step.opname, step.argval
        if operation in _BETWEEN:
            continue
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*(path or ("",)), argument)
        elif operation == "LOAD_SUPER_ATTR":
            path, in_super = ("super", argument), False
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            path, in_super = ("global", argument), in_super or argument == "super"
        elif "LOAD_FAST" in operation:  # some load two, or store one and load another
            names = argument if isinstance(argument, tuple) else (argument,)
            names = names[-1:] if operation.startswith("STORE") else names
            found += [("local", name) for name in names]
            path = ("local", names[-1])
        elif operation.startswith("LOAD_") and operation.endswith(("DEREF", "CLOSURE")):
            path = ("closure", argument)
        elif operation == "IMPORT_NAME":
            level = earlier[0]
            module, path = "." * (level if isinstance(level, int) else 0) + argument, ()
        elif operation == "IMPORT_FROM":
            path = ("import", module, argument)
        elif operation in _CALLS and in_super:
            path, in_super = ("super",), False
        else:
            path = ()
            in_super = in_super and operation == "LOAD_CONST"
        if len(path) > 1:
            found.append(path)
        earlier = (earlier[1], argument)
    return tuple(found)

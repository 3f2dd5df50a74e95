"""What patching leaves in modules: every function and class that can be reached in them, by identity."""

import sys
import types

_KINDS = (types.FunctionType, type, staticmethod, classmethod, property, types.MethodType)


def _names(packages):
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            yield name, module


def _functions_of(value):
    """The functions behind a descriptor or a wrapper that functools made."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    for found in (value.fget, value.fset) if isinstance(value, property) else (value,):
        if isinstance(found, types.FunctionType):
            yield found
        elif isinstance(getattr(found, "__wrapped__", None), types.FunctionType):
            yield found.__wrapped__


def _cells(path, function, seen):
    """What a function's closure holds, as far as that is functions again."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            held = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        for inner in _functions_of(held):
            yield f"{path}[{name}]", inner
            yield from _cells(f"{path}[{name}]", inner, seen)


def reachable(packages):
    """{"module:Class.name[cell]": object} of all modules of `packages`: functions, classes, and closures."""
    found = {}
    for name, module in _names(packages):
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):  # also one that imports what is asked of it
                continue
            if isinstance(value, _KINDS) or callable(getattr(value, "__wrapped__", None)):
                found[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, member in list(vars(value).items()):
                    if isinstance(member, _KINDS) and not isinstance(member, type):
                        found[f"{name}:{attribute}.{inner}"] = member
    seen = set()
    for path, value in list(found.items()):
        for function in _functions_of(value):
            found.update(_cells(path, function, seen))
    return found


def changed(before, after):
    """Where another object is than before, or none."""
    return sorted(path for path, value in before.items() if after.get(path) is not value)


def made_by(found, directories):
    """Where a function is whose code lies in one of `directories`."""
    return sorted(
        path
        for path, value in found.items()
        for function in _functions_of(value)
        if function.__code__.co_filename.startswith(tuple(directories))
    )

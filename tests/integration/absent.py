"""Packages that are not installed, and of which a trainer calls nothing: all modules and all names are there."""

import importlib.abc
import importlib.machinery
import sys


class _Anything:
    """A class to derive from, a context, and a decorator that changes nothing."""

    def __init__(self, *arguments, **options):
        pass

    def __call__(self, *arguments, **options):
        return arguments[0] if arguments else self

    def __class_getitem__(cls, item):
        return cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        named = any(name == absent or name.startswith(f"{absent}.") for absent in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if named else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _any


def _any(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {})


def stand_in(*names):
    sys.meta_path.insert(0, _Finder(names))

"""Stands in for the library of that name, which needs Arrow: trainers read data with it, and no test here does.

Every module of it can be imported, and every name in it: a class to derive from, or a function that refuses.
"""

import importlib.abc
import importlib.machinery
import sys

from filelock import FileLock

__path__ = []


class _Class:
    def __class_getitem__(cls, item):
        return cls


def _any(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "FileLock":
        return FileLock
    if name[0].isupper():
        return type(name, (_Class,), {})

    def refuse(*args, **kwargs):
        raise RuntimeError(f"datasets.{name} was called, but here is only a stand-in")

    return refuse


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("datasets.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _any


sys.meta_path.insert(0, _Finder())
__getattr__ = _any

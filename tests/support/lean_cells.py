"""What shim and its helpers do for each test of a cell, shortened in `make test`; together up to a third of its time.

Nearly every test plans, applies and reverts. So what installed releases are and say of a patch is read once, as none of
them changes; and CUDA becomes the CPU once, if calls are nested. `make matrix` does everything on the newest cell, as a
user's shim does.
"""

import contextlib
import functools
import sys

import chosen
from torch.overrides import _get_current_function_mode_stack

from shim import _api
from shim._planning import options, plan
from shim._releases.detect import Environment
from shim.testing import cpu


def begin(cell, cells):
    if (cell == cells[-1] and not chosen.ONCE) or isinstance(options.load_matrix, functools.partial):
        return
    options.load_matrix = functools.partial(_loaded, options.load_matrix, functools.cache(options.load_matrix))
    _api.detect = functools.partial(_detected, _api.detect, {})
    plan.match = functools.partial(_matched, plan.match, {})
    cpu._CudaMeansCpu = functools.partial(_on_cpu, cpu._CudaMeansCpu)


def _loaded(load, load_once, path=None):
    return load_once() if path is None else load(path)


def _detected(detect, known, sources):
    found = known.get(tuple(sys.path)) or known.setdefault(tuple(sys.path), detect(sources))
    return Environment(found.installed, sources, found.python)


def _matched(match, known, entry, environment, matrix, proved=None):
    if proved is not None or not matrix.shipped:
        return match(entry, environment, matrix, proved)
    asked = entry.id, tuple(sys.path), *environment.versions.items()
    return known.get(asked) or known.setdefault(asked, match(entry, environment, matrix))


def _on_cpu(mode):
    entered = any(type(each) is mode for each in _get_current_function_mode_stack())
    return contextlib.nullcontext() if entered else mode()

"""Where shim looks for aliases in cells: everywhere but in Python's own modules and in packages beneath torch.

A search through all of them is two fifths of the time of a cell, because nearly every test applies and reverts. No test
puts a function of megatron-core there. `make matrix` looks everywhere on the newest cell, as a user's shim does.
"""

import functools
import sys

import chosen

from shim._engine import transactions

SKIPPED = {*sys.stdlib_module_names, "torch", "sympy", "networkx", "numpy", "hypothesis", "_pytest", "triton", "mpmath"}


def begin(cell, cells):
    if (cell == cells[-1] and not chosen.ONCE) or isinstance(transactions.find_aliases, functools.partial):
        return
    transactions.find_aliases = functools.partial(_find, transactions.find_aliases)


def _find(search, objects, modules=None):
    names = list(sys.modules) if modules is None else modules
    return search(objects, [name for name in names if name.partition(".")[0] not in SKIPPED])

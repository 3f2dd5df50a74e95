"""What torch.compile makes, in `make test`, of the functions that megatron-core marks for it: graphs, run as they are.

Its default backend writes C++ for each of them and has it compiled. Where nothing is compiled yet, as in CI, that is a
fifth of the time of files about experts and multi-token prediction. dynamo traces them all the same, so a patch that
breaks a graph is found. `make matrix` compiles them.
"""

import functools

import chosen
import torch


def run_as_they_are():
    """To be called before megatron-core is imported, which asks for the default backend then."""
    if chosen.ONCE and not hasattr(torch.compile, "__wrapped__"):
        torch.compile = _eager(torch.compile)


def _eager(compiled):
    """A function of torch by its name: shim asks whose a decorator is, and Python 3.10 has no other sign."""

    @functools.wraps(compiled)
    def compile(*args, **kwargs):
        return compiled(*args, **{"backend": "eager", **kwargs})

    return compile

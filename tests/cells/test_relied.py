"""What patches rely on without binding it, on a real release: upstream's own is not named, and anything else is."""

import functools
import types
from importlib import import_module

import shim
from shim._engine.engine import ENGINE

CELLS = "every"


def relied_on():
    """(patch, body, class or module, name, value there) for each function that an applied patch relies on."""
    for decision in ENGINE.plan.decisions.values():
        for body in decision.wiring.depends_on if decision.wanted and decision.wiring else ():
            module, _, qualname = body.partition(":")
            if "transformer_engine" in module:  # there is none in these cells
                continue
            *path, name = qualname.split(".")
            owner = functools.reduce(getattr, path, import_module(module))
            value = vars(owner).get(name)
            if hasattr(getattr(value, "__func__", None), "__wrapped__"):
                continue  # decorated as well as static: whatever decorated it may have made what stands there
            if isinstance(getattr(value, "__func__", value), types.FunctionType):
                yield decision.id, body, owner, name, value


def sentences(report):
    return {(id, text.split()[3].rstrip(",")) for id in report for text in report[id].others if "relies on" in text}


def foreign(value):
    """What somebody else may put there: a function that wraps the one before."""
    inner = getattr(value, "__func__", value)

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        return inner(*args, **kwargs)

    return type(value)(theirs) if inner is not value else theirs


def test_upstreams_own_functions_are_not_named(monkeypatch):
    with shim.patched():
        relied = list(relied_on())
        assert len({body for _, body, *_ in relied}) > 3
        assert not sentences(shim.status())
        for _, _, owner, name, value in {place[1]: place for place in relied}.values():
            monkeypatch.setattr(owner, name, foreign(value))
        found = shim.check()
        assert sentences(found) == {(id, body) for id, body, *_ in relied}
        assert all(__file__ in text for id in found for text in found[id].others if "relies on" in text)
        monkeypatch.undo()
        assert not sentences(shim.status())

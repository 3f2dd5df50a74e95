"""A trainer's function in the place of upstream's, in every module that holds it, before shim.apply() or after it."""

import contextlib
import sys

import shim


def put_everywhere(monkeypatch, module, name, function):
    """As a patch manager does it that walks over all modules: no caller holds what `module` has as `name`."""
    before = getattr(module, name)
    for other in [other for key, other in list(sys.modules.items()) if key.startswith("megatron.core")]:
        for key in [key for key, value in vars(other).items() if value is before]:
            monkeypatch.setattr(other, key, function)


def state_beside(monkeypatch, id, module, name, function, first, models=None):
    """The report of a patch with `function` in the place, once shim.check() has tried it; it is required.

    A conflict is what `require` raises for.    first: "shim" or "trainer".
    """
    with contextlib.ExitStack() as stack:
        if first == "shim":
            stack.enter_context(shim.patched(only=[id], require=[id]))
        put_everywhere(monkeypatch, module, name, function)
        if first == "trainer":
            stack.enter_context(shim.patched(only=[id], require=[id]))
        try:
            shim.check(models)
            raised = False
        except shim.NotMetError as error:
            raised = True
            assert id in str(error)
        found = shim.status()[id]
        assert raised == (found.state == "conflict"), str(found)
        monkeypatch.undo()
        return found

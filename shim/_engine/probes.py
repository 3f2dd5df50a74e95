"""A patch's probe of an override: what the override does to a tiny input, tried once, with nothing left behind.

A patch module may define `probe(module, method, models)`. It gets the instance, the overridden method as
``package.module:Class.name``, and the models that check() was given. In the place of a function that is no method it
gets the foreign function itself, and no model is needed. It returns True (the override keeps the fix),
False (the override hides it), or None or a text (not known, and why).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shim._engine.aliases import namespace_of
from shim._planning.plan import Decision, Plan
from shim._torch_names import required

__all__ = ["NOT_YET", "NO_VERDICT", "Probe", "Tries", "Verdict", "facts_of", "of_patch", "run"]

Probe = Callable[[Any, str, list[Any]], "bool | str | None"]
Verdict = tuple["bool | None", str]  # the second says why nothing is known
MOST_VERDICTS = 1000
NOT_YET = "shim.check has not tested yet whether the patch has its effect"
NO_VERDICT = "shim cannot tell whether the patch has its effect"  # if it says nothing


def run(probe: Probe, module: Any, method: str, models: list[Any]) -> Verdict:
    """The verdict of a probe. An exception, also of the override, means that nothing is known."""
    try:
        with _undisturbed(module):
            found = probe(module, method, models)
    except Exception as error:  # noqa: BLE001 - the override belongs to others, and a check must not fail by it
        text = str(error).strip().partition("\n")[0]
        return None, f"trying it raised {type(error).__name__}" + (f": {text}" if text else "")
    return found if isinstance(found, bool) else None, found if isinstance(found, str) else ""


@contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Gradients on, warnings off, messages between ranks refused; afterwards random state and all modes as before."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch = sys.modules.get("torch")
        if torch is not None:
            device = _device_of(module, torch)
            if device.type == "cpu":
                stack.enter_context(torch.random.fork_rng(devices=[]))
            else:
                stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_no_messages())
        yield


def _device_of(module: Any, torch: Any) -> Any:
    parameters = getattr(module, "parameters", None)
    first = next(iter(parameters()), None) if parameters is not None else None
    device = torch.device("cpu") if first is None else first.device
    if device.type == "meta":
        raise ValueError("the weights are on the meta device; check the model once it has its weights")
    return device


def _no_messages() -> Any:
    """A mode that refuses collectives and messages: other ranks may have no such override, and would not answer."""

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"it sends messages between ranks ({function})")
        return function(*args, **(kwargs or {}))

    mode: Any = required("torch.utils._python_dispatch:TorchDispatchMode")
    made: Any = type("NoMessages", (mode,), {"__torch_dispatch__": dispatch})
    return made()


def facts_of(module: Any) -> tuple[Any, ...]:
    """What the verdict on an override may depend on, besides the override: the module's config, and what is frozen."""
    config = getattr(module, "config", None)
    plain = (bool, int, float, str, type(None))
    options = tuple((name, value) for name, value in getattr(config, "__dict__", {}).items() if type(value) in plain)
    parameters = getattr(module, "parameters", None)
    trained = {weight.requires_grad for weight in parameters()} if parameters is not None else set()
    return hash(options), bool(getattr(module, "training", True)), frozenset(trained)


def of_patch(decision: Decision, plan: Plan, name: str) -> Any:
    """A function of the patch's module, if the module is loaded and has it; else None."""
    module = sys.modules.get(plan.matrix.patches[decision.id].module)
    return None if module is None else namespace_of(module).get(name)


class Tries:
    """The verdicts of probes on these models. Each function is tried once, and again if its module differs.

    trying: whether this is check(). A report only repeats what check() has found.
    """

    def __init__(self, plan: Plan, models: list[Any], verdicts: dict[Any, Verdict], trying: bool) -> None:
        self.plan, self.models, self.verdicts, self.trying = plan, models, verdicts, trying
        self._facts: dict[int, Any] = {}

    def of(self, decision: Decision, method: str, module: Any, function: Any) -> Verdict:
        """What the patch's probe says of `function`, which `module` runs as `method`."""
        probe = of_patch(decision, self.plan, "probe")
        if probe is None:
            return None, "shim cannot test whether the patch has its effect"
        if id(module) not in self._facts:
            self._facts[id(module)] = facts_of(module), *(type(model).__qualname__ for model in self.models)
        what = (decision.id, decision.variant, repr(sorted(decision.options.items())), method)
        key = (what, getattr(function, "__code__", function), type(module).__qualname__, self._facts[id(module)])
        if key not in self.verdicts:
            if not self.trying:
                return None, NOT_YET
            if len(self.verdicts) >= MOST_VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = run(probe, module, method, self.models)
        return self.verdicts[key]

"""A proof: the smallest run that shows a defect on stock, and shows it gone with the patch.

The proofs of a patch are beside it: those of `shim.patches.megatron_core.rope_thd` in the module
`shim.patches.megatron_core.rope_thd.proof`. `shim prove`, the tests of the release cells and docs/defects.md use them.

    @proof("losses off by {:.1e}", bound=1e-5, ranks=2)
    def smoothed_losses(here):
        '''The defect of stock, its reproduction, and the right result: the text of an issue.'''
        return max(here.run(error_on_rank, layout=Layout(tp=here.world)))
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from shim._errors import ShimError

from .layout import Layout, layout_initialised
from .ranks import RankError, Ranks

__all__ = [
    "CannotRunError",
    "Here",
    "LacksFeatureError",
    "Measured",
    "Proof",
    "Side",
    "measure",
    "proof",
    "proofs_of",
]

ENDINGS = (".proof", ".gpu_proof")  # of the modules with the proofs of a patch; the second if they fill a file
# Errors that say what torch or Triton cannot do here: an expression for "Type: message", and the reason in words.
_LACKING = (
    # up to torch 2.6
    (r"Cannot use (?P<what>ReduceOp\.\w+) with Gloo", "gloo of torch {torch} has no {what}"),
    (r"(Backend gloo|ProcessGroupGloo) does not support (?P<what>\w+)", "gloo of torch {torch} has no {what}"),
    (r"load\(\) got an unexpected keyword argument 'no_dist'", "torch {torch} loads no file of this release"),
    # Triton up to 3.8, and Triton 3.5
    (r"InterpreterError: .*has no attribute 'get_bf16'", "the interpreter of Triton {triton} has no numbers in bf16"),
    (r"InterpreterError: .*only 0-dimensional arrays", "the interpreter of Triton {triton} fails with numpy {numpy}"),
)
DEFECTS = ("silent", "crash", "hang", "memory", "time", "missing")


class CannotRunError(ShimError):
    """A proof cannot run here, and why: no GPU of the kind it needs, another error before what it measures."""


class LacksFeatureError(CannotRunError):
    """The tree has no such feature, so that it cannot have the defect: no DSA, no padding mask that a model takes."""


@dataclass(frozen=True)
class Measured:
    """A proof's measurement on one side.

    value: in the unit of the proof's text; the smaller the better. NaN is never right.
    curves: by name, the values of a quantity over the steps of a run, for a picture. "truth" is the right curve,
        "measured" that of this side.
    bound: the largest number that is right, if this run has measured it; None for that of the proof.
    """

    value: float
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    bound: float | None = None


@dataclass(frozen=True)
class Side:
    """One side of a proof, stock or patched: its result, in words and in numbers.

    text: "gradient off by 9.1e-02", "TypeError: ...", or the reason why it could not run. For an unexpected error:
        the errors of all ranks that failed, and the expected one.
    value: the measurement, or None.
    lacks: if it cannot run, whether that is because the tree lacks the feature.
    state: "right", "wrong", "cannot run", or "broken": the proof itself failed, of which `details` has the traceback.
    """

    state: str
    text: str
    seconds: float
    value: float | None = None
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    details: str = ""
    lacks: bool = False


@dataclass(frozen=True)
class Proof:
    """One proof; made by `proof`."""

    function: Callable[[Here], float | Measured]
    says: str
    bound: float
    right: str
    defect: str
    crashes: str
    ranks: int
    devices: tuple[str, ...]
    te: bool
    beside: tuple[str, ...]
    variants: tuple[str, ...]
    curve: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The function's name, with hyphens: it names the proof if a patch has several."""
        return self.function.__name__.replace("_", "-")

    def text_of(self, value: float) -> str:
        """The measurement in words."""
        return self.right if self.right and value == 0 else self.says.format(value)


def proof(
    says: str,
    *,
    bound: float = 0.0,
    right: str = "",
    defect: str = "silent",
    crashes: str = "",
    ranks: int = 1,
    devices: Sequence[str] = ("cpu",),
    te: bool = False,
    beside: Sequence[str] = (),
    variants: Sequence[str] = (),
    curve: str = "loss",
    options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[[Here], float | Measured]], Proof]:
    """Make a proof of a function that measures one number (or returns a `Measured`); the smaller, the better.

    The function runs twice, each time in a separate process: on stock, and with the patch applied. It must not ask
    which it is. Its docstring is the minimal reproduction: the defect, how to see it, and the right result.

    says: a format for the number: "gradient off by {:.1e}". right: the text instead of zero: "bit-equal".
    bound: the largest number that is right.
    defect: its kind, one of `DEFECTS`.
    crashes: the error of stock if the defect is a crash: a regular expression for "Type: message". Of ranks, one that
        raises it is enough. Any other error is an error of the proof.
    ranks: how many ranks it needs at least; a user may ask for more, see `Here.world`.
    devices: that it can run on: "cpu", "cuda", or both.
    te: whether Transformer Engine has to be there when megatron-core is imported; on a CPU its Python layer is enough.
    beside: further patches that both sides need.
    variants: those of the patch on whose releases stock is wrong in this way; empty for all.
    curve: the quantity in `Measured.curves`, which names the axis of the picture.
    options: of the patch, on the side that has it, if its defaults switch it off.
    """
    if defect not in DEFECTS:
        raise ValueError(f"defect={defect!r} is not one of {', '.join(DEFECTS)}")

    def made(function: Callable[[Here], float | Measured]) -> Proof:
        if not (function.__doc__ or "").strip():
            raise ValueError(f"the proof {function.__name__} has no docstring, which is its reproduction")
        how = (ranks, tuple(devices), te, tuple(beside), tuple(variants), curve, tuple((options or {}).items()))
        return Proof(function, says, bound, right, defect, crashes, *how)

    return made


def proofs_of(module: str) -> list[Proof]:
    """The proofs of the patch in this module, in the order of their definition."""
    if not hasattr(import_module(module), "__path__"):  # one file, so nothing is beside it
        return []
    beside = [f"{module}{ending}" for ending in ENDINGS]
    there = [import_module(name) for name in beside if find_spec(name) is not None]
    return [value for found in there for value in vars(found).values() if isinstance(value, Proof)]


class Here:
    """Where a proof runs.

    device: "cpu" or "cuda". world: how many ranks it shall use, at least those it asked for.
    """

    def __init__(self, device: str = "cpu", world: int = 1, te: bool = False) -> None:
        self.device = device
        self.world = world
        self._te = te

    def run(
        self, function: Callable[..., Any], *args: Any, layout: Layout | None = None, timeout: float | None = None
    ) -> Any:
        """function(*args) inside an initialised layout: the result of each rank, in a list.

        layout: by default one rank. One rank runs in this process, more in forked ones, over gloo; the function must
        then be at the top level of a module, and its result a thing that can be pickled. A CannotRunError of a rank
        is raised here again.
        """
        layout = Layout() if layout is None else layout
        if layout.world == 1:
            return [_on_rank(function, args, layout, self.device, self._te)]
        if self._te:
            from .fp8_layer import forget_fp8_state

            # A group of this process would be freed in the forked one, and wait there for threads that it lacks.
            forget_fp8_state()
        try:
            with Ranks(layout.world) as ranks:
                return ranks.run(_on_rank, function, args, layout, "cpu", self._te, timeout=timeout)
        except RankError as error:
            for failed in (error, *error.others):
                for kind in (CannotRunError, LacksFeatureError):
                    if failed.exception_type == kind.__name__:
                        why = failed.remote_traceback.rpartition(f"{kind.__name__}: ")[2]
                        raise kind(why.strip()) from error
            raise


def _on_rank(function: Callable[..., Any], args: Sequence[Any], layout: Layout, device: str, te: bool) -> Any:
    with on_device(device, te), layout_initialised(layout):
        return function(*args)


_OPEN: list[str] = []  # the device of the region that is open in this process


@contextlib.contextmanager
def on_device(device: str, te: bool) -> Iterator[None]:
    """Let megatron-core, and Transformer Engine if asked, run on this device. May be nested."""
    if device != "cpu":
        # Some images turn TF32 on, whose rounding is above what is right in fp32.
        torch.set_float32_matmul_precision("highest")
    if device != "cpu" or _OPEN:
        yield
        return
    from .cpu import megatron_on_cpu
    from .transformer_engine import te_cuda_stand_ins

    with megatron_on_cpu(), te_cuda_stand_ins() if te else contextlib.nullcontext():
        _OPEN.append(device)
        try:
            yield
        finally:
            _OPEN.pop()


def measure(found: Proof, here: Here) -> Side:
    """Run one side of a proof in this process, with the patches applied here."""
    started = time.monotonic()
    try:
        with on_device(here.device, found.te):
            measured = found.function(here)
    except CannotRunError as error:
        lacks = isinstance(error, LacksFeatureError)
        return Side("cannot run", str(error), time.monotonic() - started, lacks=lacks)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("megatron", "transformer_engine"):
            return _crashed(found, error, time.monotonic() - started)
        return Side("cannot run", f"{error.name} is not installed", time.monotonic() - started)
    except torch.OutOfMemoryError as error:
        return Side("cannot run", f"not enough memory: {_short(str(error))}", time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - a crash may be the defect
        return _crashed(found, error, time.monotonic() - started)
    seconds = time.monotonic() - started
    if not isinstance(measured, Measured):
        measured = Measured(float(measured))
    text, bound = found.text_of(measured.value), found.bound if measured.bound is None else measured.bound
    if measured.bound is not None:
        text += f" (up to {bound:.1e} may be rounding here)"
    state = "right" if measured.value <= bound else "wrong"
    return Side(state, text, seconds, measured.value, measured.curves)


def _crashed(found: Proof, error: Exception, seconds: float) -> Side:
    failed = (error, *error.others) if isinstance(error, RankError) else (error,)
    raised = [_raised(each) for each in failed]
    for text in raised if found.crashes else ():
        # Any rank may be the one that fails first, and with each of the errors that a defect gives the ranks.
        if re.search(found.crashes, text):
            return Side("wrong", _short(text), seconds, math.inf)
    lacking = _lacking(raised)
    if lacking:
        return Side("cannot run", lacking, seconds)
    said = "; ".join(map(_short, raised))
    if found.crashes:
        said += f" (the proof expects {found.crashes!r})"
    tracebacks = [traceback.format_exc(), *(str(each) for each in failed[1:])]
    return Side("broken", said, seconds, details="\n".join(tracebacks))


def _lacking(raised: Sequence[str]) -> str:
    """What the errors say that this torch or Triton cannot do, or ""."""
    for expression, reason in _LACKING:
        found = next(filter(None, (re.search(expression, text) for text in raised)), None)
        if found is not None:
            return reason.format_map(_Versions(found.groupdict()))
    return ""


class _Versions(dict[str, str]):
    """Beside what is in it: by the name of a package its version here."""

    def __missing__(self, package: str) -> str:
        return version(package)


def _raised(error: Exception) -> str:
    """ "Type: message" of an error; of a RankError, that of the rank's error."""
    if isinstance(error, RankError):
        # The errors in a traceback are at the beginning of their lines; the last is the one that was not caught.
        raised = re.findall(r"^[A-Za-z_][\w.]*(?:: .*)?$", error.remote_traceback, re.M)
        if raised:
            return re.sub(r"^[\w.]*\.(?=\w)", "", raised[-1])
    return f"{type(error).__name__}: {error}"


def _short(text: str) -> str:
    line = (text.strip().splitlines() or [""])[0]
    return line if len(line) <= 120 else f"{line[:117]}..."

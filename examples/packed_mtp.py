"""Trains a small GPT with multi-token prediction on packed text, stock against shim, on the installed release.

Ends with 0 only if packed rows with shim equal their sequences alone, and revert brought stock back.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Upstream warns of all the optional kernels that a CPU has no use for; shim's own warnings stay.
warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)

import corpus  # noqa: E402
import torch  # noqa: E402

import shim  # noqa: E402
from shim import testing  # noqa: E402

PATCH = "mtp-packed-sequences"
WIDTH = 110
PASS_BOUND = 1e-6  # one pass, relative: a few times the rounding of float32, which a mask in another place changes
CURVE_BOUND = 5e-6  # losses over a run, relative: the rounding of one step goes into the weights of the next
TIMED = 7

Row = testing.PackedRow


class Losses(NamedTuple):
    """The log of a trainer for a step: the mean main loss, and the mean loss of each MTP layer."""

    main: float
    mtp: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.main:.4f}   {' '.join(f'{loss:.4f}' for loss in self.mtp)}"


def say(text: object = "", indent: str = "  ") -> None:
    for line in str(text).splitlines() or [""]:
        print(textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False), flush=True)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


# The work


def build() -> Any:
    """The same weights each time: 2 layers and 2 MTP layers, hidden size 64."""
    return testing.build_gpt(mtp_num_layers=2, vocab_size=corpus.VOCAB_SIZE, hidden_size=64, ffn_hidden_size=128)


def packed_losses(model: Any, row: Row) -> Losses:
    """Forward and backward on a packed row, called as a trainer calls it; the gradients stay in the weights."""
    model.zero_grad(set_to_none=True)
    per_token = model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        attention_mask=None,
        labels=row.labels,
        loss_mask=row.loss_mask,
        packed_seq_params=row.packed_seq_params(),
    )
    loss = (per_token * row.loss_mask).sum() / row.loss_mask.sum()
    loss.backward()
    return Losses(loss.item(), mtp_losses())


def mtp_losses() -> tuple[float, ...]:
    """Takes the logged losses out of the release's tracker, which adds up until then."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    logged = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    taken = tuple(logged.tolist())
    tracker.clear()
    return taken


def alone_losses(model: Any, row: Row) -> Losses:
    """The truth: the release runs every sequence alone, and the gradients of all of them go into the weights."""
    result = testing.run_alone(model, row)
    for name, weight in model.named_parameters():
        weight.grad = result.grads.get(name)
    return losses_of(result, row)


def losses_of(result: testing.Result, row: Row) -> Losses:
    mask = row.loss_mask[0]
    return Losses(((result.main * mask).sum() / mask.sum()).item(), tuple(result.logged.tolist()))


def train(one_pass: Callable[[Any, Row], Losses], rows: list[Row], steps: int) -> list[Losses]:
    """Plain SGD, a row per step. Adam would turn the rounding of gradients near zero into whole steps."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = []
    for step in range(steps):
        curve.append(one_pass(model, rows[step % len(rows)]))
        optimizer.step()
    return curve


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """The result of the function, or the exception it raises: stock up to 0.15 refuses packed rows."""
    try:
        return function(*args)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return error.with_traceback(None)


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def times(model: Any, row: Row, stock_runs: bool) -> tuple[float | None, float]:
    """Median seconds of a pass, stock and shim in turns, so that other work on the machine slows both."""
    stock, shimmed = [], []
    for _ in range(TIMED):
        if stock_runs:
            stock.append(seconds_of_pass(model, row))
        with shim.patched():
            shimmed.append(seconds_of_pass(model, row))
    return (statistics.median(stock) if stock else None), statistics.median(shimmed)


def seconds_of_pass(model: Any, row: Row) -> float:
    started = time.perf_counter()
    attempt(packed_losses, model, row)
    return time.perf_counter() - started


# A run that failed is off by infinity. The maximum is torch's, because Python's may lose a NaN.


def furthest_pass(a: Any, truth: testing.Result) -> float:
    """The largest of the relative differences of losses and gradients; NaN if there is any."""
    if isinstance(a, Exception):
        return math.inf
    return torch.tensor(list(testing.differences(a, truth).values()), dtype=torch.float64).max().item()


def furthest(a: Any, b: list[Losses]) -> float:
    """The largest relative difference of two curves, main and MTP losses; NaN if there is any."""
    if isinstance(a, Exception):
        return math.inf
    x, y = (torch.tensor([(step.main, *step.mtp) for step in curve], dtype=torch.float64) for curve in (a, b))
    return ((x - y) / y).abs().max().item()


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, Exception) or isinstance(b, Exception):
        return type(a) is type(b) and str(a) == str(b)
    losses = torch.equal(a.main, b.main) and torch.equal(a.logged, b.logged) and all(map(torch.equal, a.mtp, b.mtp))
    return losses and a.grads.keys() == b.grads.keys() and all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)


# The contents of megatron's modules, found without asking shim


def owners() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron":
            yield name, module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{value.__qualname__}", value


def contents() -> dict[str, Any]:
    """Every name of every module and class of megatron -> the object it holds."""
    return {f"{place}.{name}": value for place, owner in owners() for name, value in list(vars(owner).items())}


# The chapters


def show_installed() -> None:
    title("1. Installed")
    for installed in shim.plan().environment.installed.values():
        print(f"{installed.distribution:<19}{installed.raw}  (version from {installed.origin})")
        print(f"{'':<19}{installed.location}")
    print(f"{'megatron-shim':<19}{shim.__version__}\n{'':<19}{Path(shim.__file__).parent}")


def show_plan() -> None:
    title("2. The plan: what shim would do here, and why (imports neither torch nor megatron)")
    say(shim.plan(), indent=" " * 16)


def show_corpus(padded: list[Row]) -> None:
    texts = corpus.documents()
    tokens = sum(length for row in padded for _, length in row.spans)
    longest, shortest = max(texts, key=lambda n: len(texts[n])), min(texts, key=lambda n: len(texts[n]))
    say(
        f"Text: {len(texts)} documents of {len(texts[shortest])} bytes ({shortest}) to {len(texts[longest])} "
        f"({longest}). Tokens are bytes: {tokens} of them in {sum(len(row.spans) for row in padded)} sequences and "
        f"{len(padded)} rows of at most {corpus.ROW}; padded rows align each sequence to {corpus.ALIGN}.",
        indent="",
    )


def show_table(kind: str, row: Row, truth: Any, by: dict[str, Any], seconds: tuple[float | None, float]) -> None:
    stock_time, shim_time = seconds
    ratio = f"x{shim_time / stock_time:.2f}" if stock_time else ""
    took = {"stock": f"{stock_time * 1e3:7.1f}" if stock_time else "", "shim": f"{shim_time * 1e3:7.1f}  {ratio}"}
    print(f"{kind:<8}alone   {losses_of(truth, row)}   the truth")
    for name, result in by.items():
        if isinstance(result, Exception):
            print(f"{'':<8}{name:<8}{textwrap.shorten(in_short(result), WIDTH - 16)}")
        else:
            error = testing.differences(result, truth)["grad"]
            print(f"{'':<8}{name:<8}{losses_of(result, row)}   {error:<14.1e}{took[name]}".rstrip())


def show_curves(truth: list[Losses], by: dict[str, Any]) -> None:
    ran = {name: curve for name, curve in by.items() if not isinstance(curve, Exception)}
    columns = [truth, *ran.values()]
    print("step  " + "".join(f"{name + ': loss, MTP':<30}" for name in ("alone", *ran)).rstrip())
    for number, losses in enumerate(zip(*columns), 1):
        print(f"{number:<6}" + "".join(f"{step!s:<30}" for step in losses).rstrip())
    off = "".join(f"{furthest(curve, truth):<30.1e}" for curve in ran.values())
    print(f"{'largest difference from alone':<36}{off}".rstrip())
    for name, curve in by.items():
        if name not in ran:
            say(f"{name} cannot run: {in_short(curve)}")


def show_revert(before: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """Prints what shim wrote and returns the names that are not as before, or hold something of shim's."""
    after = contents()
    gone = object()
    of_shim = {id(value) for value in written.values() if not isinstance(value, bool | None)}
    left = [place for place in written if after.get(place, gone) is not before.get(place, gone)]
    left += [place for place, value in after.items() if id(value) in of_shim and place not in left]
    say(f"shim had written {len(written)} names: " + ", ".join(p.removeprefix("megatron.core.") for p in written))
    say(f"Each holds its original object: {'NO: ' + ', '.join(left) if left else 'yes'}")
    return left


def demo(steps: int) -> Iterator[str]:
    """Runs and prints everything; yields what was not met."""
    rows = {"plain": corpus.rows(1), "padded": corpus.rows(corpus.ALIGN)}
    # The row with the most sequences has the most places to go wrong.
    widest = max(range(len(rows["plain"])), key=lambda i: len(rows["plain"][i].spans))
    one = {kind: all_rows[widest] for kind, all_rows in rows.items()}

    title("3. One row, stock against shim")
    show_corpus(rows["padded"])
    print("Running stock, each sequence alone, and timings ...\n", flush=True)
    model = build()
    # All of the truth is computed before shim is there.
    truth = {kind: testing.run_alone(model, row) for kind, row in one.items()}
    stock = {kind: attempt(testing.run_packed, model, row) for kind, row in one.items()}
    true_curve = train(alone_losses, rows["padded"], steps)
    stock_curve = attempt(train, packed_losses, rows["padded"], steps)
    seconds = {kind: times(model, row, not isinstance(stock[kind], Exception)) for kind, row in one.items()}

    before = contents()
    shim.apply(require=[PATCH])
    written = {place: value for place, value in contents().items() if value is not before.get(place)}
    say(f"shim.apply(require=[{PATCH!r}]); shim.check(model):\n{shim.check(model).summary}\n\n")
    print(f"{'row':<8}{'with':<8}{'loss     MTP 1  MTP 2':<25}{'gradient off':<14}ms a pass on CPU, median of {TIMED}")
    for kind, row in one.items():
        shimmed = attempt(testing.run_packed, model, row)
        show_table(kind, row, truth[kind], {"stock": stock[kind], "shim": shimmed}, seconds[kind])
        worst = furthest_pass(shimmed, truth[kind])
        if not worst <= PASS_BOUND:
            yield f"{kind} row: shim is {worst:.1e} from alone, and {PASS_BOUND:.0e} is allowed"
    say(f"Gradient off: norm of the difference from alone over the norm; shim must stay within {PASS_BOUND:.0e}.")

    title(f"4. {steps} steps of training on padded rows (SGD, a row per step)")
    shim_curve = attempt(train, packed_losses, rows["padded"], steps)
    show_curves(true_curve, {"shim": shim_curve, "stock": stock_curve})
    worst = furthest(shim_curve, true_curve)
    say(f"Relative; shim must stay within {CURVE_BOUND:.0e}, since rounding grows from step to step.")
    if not worst <= CURVE_BOUND:
        yield f"training: shim is {worst:.1e} from alone, and {CURVE_BOUND:.0e} is allowed"

    title("5. shim.revert()")
    shim.revert()
    left = show_revert(before, written)
    if left:
        yield f"revert: {', '.join(left)} not as before"
    for kind, row in one.items():
        again = attempt(testing.run_packed, model, row)
        same = same_bits(again, stock[kind])
        what = "the exception" if isinstance(again, Exception) else "losses and all gradients"
        say(f"Stock on the {kind} row: {what} {'as' if same else 'NOT as'} at the start, to the bit.")
        if not same:
            yield f"revert: stock gives something else on the {kind} row than before"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16, help="training steps (default 16)")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)
    show_installed()
    show_plan()
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        wrong = list(demo(options.steps))
        release = testing.release()
    print()
    for line in wrong:
        say(f"NOT MET: {line}")
    if wrong:
        return 1
    say(
        f"Shown in {time.perf_counter() - started:.0f} s: on megatron-core {release} with shim, packed rows with "
        "multi-token prediction train as every sequence does alone, with and without padding, and shim.revert() "
        "brings stock back.",
        indent="",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

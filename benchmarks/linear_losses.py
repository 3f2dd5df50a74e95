"""Losses from hidden states and the output weight: megatron-core, fused-linear-logprob, and other projects' linear
forms, side by side in one run.

    python benchmarks/linear_losses.py [--release 0.18.2] [--release-dir DIR] [--peers DIR] [--repeats 5] [--quick]
    python benchmarks/linear_losses.py --real    # heads of real sizes beside torch's own linear form; half an hour

A step: a whole GPTModel, stock against the patch. Its peak is counted at 32,768 tokens and a vocabulary of 151,936, on
tensors without memory ("meta"), for which the patch takes the tiles of a GPU. Its CPU time is taken at sizes
that fit. A head: only the output layer and its loss, with the peers that logprob_peers.py finds.

`memory` is the most bytes of a step's tensors at one time, the gradient of the weight included, in fp32 copies of
the logits. `products` are in units of the one that makes the logits: stock has three. Errors are against fp64: of a
loss, and of a gradient in parts of its norm. `launches` are operations that touch memory, and Triton kernels; `moved`
is the bytes that they read and write. `reads` make the host wait for a GPU. Temporaries inside an operation are not
seen. Code that is compiled elsewhere runs op by op while it is counted.

With --real, `memory` is what the system says: the peak of the process in forward and backward beyond what it held
before. So it has what operations make inside of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from on_release import ALLOCATOR, cpu_name, measured, parser_of, peers_on_path

RELEASE = "0.18.2"
ID = "fused-linear-logprob"
REAL = (32768, 151936)  # tokens, vocabulary
WIDTH_ON_GPU, CHUNK_ON_GPU = 4096, 1024
STEPS = ((1024, 32768, 256, "float32"), (1024, 32768, 1024, "float32"), (256, 32768, 64, "bfloat16"))
HEADS = ((512, 32768, 512, "float32"), (256, 32768, 64, "bfloat16"))
REAL_HEADS = ((4096, 32768, 2048), (1024, 151936, 2048))  # in fp32
Heads = tuple[tuple[int, ...], ...]
CHUNK = 256  # tokens of torch's form at a time, beside what it chooses
SMALL = (64, 1024, 64)  # sizes for an interpreted kernel: tokens, vocabulary, hidden
MEMORY, TIME = 0.15, 1.3  # of stock, at most
NOISE = 0.1


def built(tokens: int, vocabulary: int, width: int, dtype: str, depths: int | None) -> Any:
    """One layer of a GPTModel, with hardly anything but its head."""
    import torch

    from shim import testing

    half = {"bf16": True, "params_dtype": torch.bfloat16} if dtype == "bfloat16" else {}
    model = testing.build_gpt(
        vocab_size=vocabulary,
        max_sequence_length=tokens,
        mtp_num_layers=depths,
        num_layers=1,
        hidden_size=width,
        ffn_hidden_size=width,
        num_attention_heads=1,
        num_query_groups=1,
        position_embedding_type="none",
        **half,
    )
    return model.bfloat16() if half else model


def take_step(model: Any, rows: Any) -> None:
    model.zero_grad(set_to_none=True)
    model(rows, rows, None, labels=rows).mean().backward()


def peak_of_step(dtype: str, depths: int | None) -> int:
    """Bytes, counted, of 32 rows of 1,024 tokens."""
    import torch
    from linear_losses_sides import Counted, kernels_on_meta

    tokens, vocabulary = REAL
    model = built(1024, vocabulary, 64, dtype, depths).to("meta")
    rows = torch.empty(tokens // 1024, 1024, dtype=torch.int64, device="meta")
    counted = Counted()
    with kernels_on_meta(counted), counted:
        take_step(model, rows)
    return counted.peak_bytes


def steps(repeats: int, verdicts: list[str]) -> None:
    import torch

    import shim

    def patched() -> Any:
        return shim.patched(only=[ID], require=[ID], options={ID: {"fuse": True}})

    print(f"\nPeak of a step, {REAL[0]} tokens, vocabulary {REAL[1]}, hidden 64; GB, counted")
    print(f"{'':<20}{'stock':>9}{'patch':>9}{'ratio':>9}")
    for dtype in ("float32", "bfloat16"):
        for depths in (None, 1):
            stock = peak_of_step(dtype, depths)
            with patched():
                patch = peak_of_step(dtype, depths)
            title = f"{dtype}, MTP {depths or 0}"
            print(f"{title:<20}{stock / 1e9:>9.2f}{patch / 1e9:>9.2f}{patch / stock:>9.3f}", flush=True)
            if patch > MEMORY * stock:
                verdicts.append(f"{title}: {patch / stock:.2f} of stock's peak")

    print(f"\nCPU time of a step; patch / stock, lowest - highest of {repeats} turns")
    for tokens, vocabulary, width, dtype in STEPS:
        for depths in (None, 1):
            model = built(tokens // 2, vocabulary, width, dtype, depths)
            rows = torch.randint(0, vocabulary, (2, tokens // 2))
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats + (dtype == "float32")):  # bf16 is slow on many a CPU; its first turn counts
                times[0].append(seconds(take_step, model, rows))
                with patched():
                    times[1].append(seconds(take_step, model, rows))
            ratios = sorted(mine / stock for stock, mine in list(zip(*times))[-repeats:])
            title = f"{tokens} tokens, vocabulary {vocabulary}, hidden {width}, {dtype}, MTP {depths or 0}"
            print(f"{title:<68}{ratios[0]:.2f} - {ratios[-1]:.2f}  (stock {min(times[0]) * 1e3:.0f} ms)", flush=True)
            if min(times[1]) > TIME * (1 + NOISE) * min(times[0]):
                verdicts.append(f"{title}: {min(times[1]) / min(times[0]):.2f} of stock's time")


def seconds(function: Callable[..., Any], *args: Any) -> float:
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def sample(tokens: int, vocabulary: int, width: int, dtype: str) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 1, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5 * 3
    target = torch.randint(0, vocabulary, (tokens, 1), generator=generator)
    return hidden.to(getattr(torch, dtype)), weight.to(getattr(torch, dtype)), target


def heads(repeats: int, verdicts: list[str]) -> None:
    import torch
    from linear_losses_sides import PATCH, STOCK, Counted, errors, exact, of_megatron, of_peers, step

    for tokens, vocabulary, width, dtype in HEADS:
        given = sample(tokens, vocabulary, width, dtype)
        sides = {**of_megatron(width, vocabulary), **of_peers(1, "cpu", 128)[0]}
        right = exact(*given)
        print(f"\nA head on a CPU, {tokens} tokens, vocabulary {vocabulary}, hidden {width}, {dtype}; chunks of 128")
        print(f"{'':<28}{'time':>14}{'memory':>9}{'loss':>10}{'gradient':>10}")
        counts = {}
        for name, side in sides.items():
            with torch.compiler.set_stance("force_eager"), Counted() as counted:
                found = step(side, *given)
            counts[name] = counted.peak_bytes / (4 * tokens * vocabulary), *errors(found, right)
            del found
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats + 1):  # the first one compiles
            for name, side in sides.items():
                took = seconds(step, side, *given)
                times[name] += [took] if turn else []
        for name, (memory, of_loss, of_gradient) in counts.items():
            ratios = sorted(mine / stock for mine, stock in zip(times[name], times[STOCK]))
            shown = f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
            print(f"{name:<28}{shown:>14}{memory:>9.2f}{of_loss:>10.1e}{of_gradient:>10.1e}", flush=True)
        if counts[PATCH][2] > (1e-6 if dtype == "float32" else 1.2 * counts[STOCK][2]):
            verdicts.append(f"hidden {width}, {dtype}: an error of {counts[PATCH][2]:.1e}")


def real_heads(repeats: int, heads: Heads) -> None:
    """Losses of tokens, and a plain sum, for which torch makes the gradients in forward: three products, not four."""
    import gc

    import torch
    from linear_losses_sides import PATCH, STOCK, of_megatron, resident

    def torchs(reduction: str, options: Any) -> Callable[..., Any]:
        function = torch.nn.functional.linear_cross_entropy
        return lambda h, w, t: function(h.squeeze(1), w, t.squeeze(1), reduction=reduction, options=options)

    for tokens, vocabulary, width in heads:
        hidden, weight, target = sample(tokens, vocabulary, width, "float32")
        weight.mul_(0.1)
        megatrons = of_megatron(width, vocabulary)
        sides = {name: megatrons[name] for name in (STOCK, PATCH)}
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            chunked = torch.nn.LinearCrossEntropyOptions()
            sides["torch, for each token"] = torchs("none", chunked)
            sides["torch, their sum"] = torchs("sum", chunked)
            larger = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK)
            sides[f"torch, their sum, {CHUNK} at a time"] = torchs("sum", larger)
            sides["torch, their sum, with logits"] = torchs("sum", None)
        times: dict[str, list[float]] = {name: [] for name in sides}
        peaks: dict[str, int] = {}
        for _ in range(repeats):
            for name, side in sides.items():
                leaves = [hidden.requires_grad_(), weight.requires_grad_()]
                gc.collect()
                before = resident(reset=True)
                start = time.process_time()
                losses = side(*leaves, target)
                gradients = torch.autograd.grad(losses.sum(), leaves)
                times[name].append(time.process_time() - start)
                peaks[name] = max(peaks.get(name, 0), resident("VmHWM") - before)
                del losses, gradients
        print(f"\nA head on a CPU, {tokens} tokens, vocabulary {vocabulary}, hidden {width}, float32", flush=True)
        print(f"{'':<32}{'seconds':>9}{'time, least':>13}{'median':>8}{'GB':>7}{'in logits':>11}")
        for name, took in times.items():
            least = min(took) / min(times[STOCK])
            middle = statistics.median(took) / statistics.median(times[STOCK])
            in_logits = peaks[name] / (4 * tokens * vocabulary)
            shown = f"{min(took):>9.1f}{least:>13.2f}{middle:>8.2f}{peaks[name] / 1e9:>7.2f}{in_logits:>11.2f}"
            print(f"{name:<32}{shown}", flush=True)


def interpreted() -> None:
    """Errors of the sides with Triton kernels; memory and time say nothing here."""
    from linear_losses_sides import errors, exact, of_megatron, of_peers, step

    tokens, vocabulary, width = SMALL
    for dtype in ("float32", "bfloat16"):
        given = sample(tokens, vocabulary, width, dtype)
        right = exact(*given)
        print(f"\nInterpreted kernels, {tokens} tokens, vocabulary {vocabulary}, hidden {width}, {dtype}")
        print(f"{'':<28}{'loss':>10}{'gradient':>10}")
        peers = {name: side for name, side in of_peers(1, "cpu", 128)[0].items() if "Liger" in name}
        for name, side in {**of_megatron(width, vocabulary), **peers}.items():
            of_loss, of_gradient = errors(step(side, *given), right)
            print(f"{name:<28}{of_loss:>10.1e}{of_gradient:>10.1e}", flush=True)


def on_gpu_counted() -> None:
    import torch
    from linear_losses_sides import count_on_meta, of_megatron, of_peers

    tokens, vocabulary = REAL
    sides = {**of_megatron(WIDTH_ON_GPU, vocabulary), **of_peers(1, "meta", CHUNK_ON_GPU)[0]}
    print(f"\nA head as on a GPU, counted: {tokens} tokens, vocabulary {vocabulary}, hidden {WIDTH_ON_GPU}, bfloat16")
    columns = f"{'GB':>8}{'memory':>9}{'products':>10}{'launches':>10}{'of Triton':>11}{'reads':>7}{'moved, GB':>11}"
    print(f"{'':<28}{columns}")
    for name, side in sides.items():
        counted = count_on_meta(side, tokens, vocabulary, WIDTH_ON_GPU, torch.bfloat16)
        memory, products = counted.peak_bytes / (4 * tokens * vocabulary), tokens * vocabulary * WIDTH_ON_GPU
        print(
            f"{name:<28}{counted.peak_bytes / 1e9:>8.1f}{memory:>9.2f}{counted.products / products:>10.2f}"
            f"{counted.torch + counted.triton:>10}{counted.triton:>11}{counted.reads:>7}"
            f"{counted.bytes_moved / 1e9:>11.0f}",
            flush=True,
        )


def messages(tokens: int, vocabulary: int, width: int) -> dict[str, tuple[int, int, int, int]]:
    """On one of two ranks with sequence parallelism: messages and bytes, forward and backward, of each side."""
    import torch
    import torch.distributed as dist
    from linear_losses_sides import Counted, of_megatron, of_peers

    import shim
    from shim import testing

    layout = testing.Layout(tp=2, sequence_parallel=True)
    found = {}
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        shim.apply(only=[ID], require=[ID], options={ID: {"fuse": True}})
        hidden, weight, target = sample(tokens, vocabulary, width, "float32")
        mine = [part.chunk(2)[dist.get_rank()].clone().requires_grad_() for part in (hidden, weight)]
        sides = {**of_megatron(width, vocabulary, sequence_parallel=True), **of_peers(2, "cpu", 128)[0]}
        for name, side in sides.items():
            with torch.compiler.set_stance("force_eager"), Counted() as counted:
                losses = side(*mine, target)
                forward = (counted.collectives.total(), counted.message_bytes)
                torch.autograd.grad(losses.sum(), mine)
            found[name] = (*forward, counted.collectives.total() - forward[0], counted.message_bytes - forward[1])
        shim.revert()
    return found


def compare(release: str, repeats: int, quick: bool, real: bool, head: Heads) -> int:
    import torch
    from linear_losses_sides import of_peers

    import shim
    from shim import testing

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
            shim.apply(only=[ID], require=[ID], options={ID: {"fuse": True}})
            interpreted()
        return 0
    print(f"megatron-core {release}, torch {torch.__version__}, 1 thread per process, {cpu_name()}")
    if real:
        with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
            shim.apply(only=[ID], require=[ID], options={ID: {"fuse": True}})
            real_heads(repeats, head or REAL_HEADS)
        return 0
    peers, missing = of_peers(1, "meta", 128)
    print(f"peers: {'; '.join(peers) or 'none'}")
    for package, reason in missing.items():
        print(f"not here: {package} ({reason})")
    verdicts: list[str] = []
    tokens, vocabulary, width = 512, 4096, 64
    with testing.Ranks(2) as world:
        found = world.run(messages, tokens, vocabulary, width, timeout=600)
    print(
        f"\nMessages of a head, TP 2 with sequence parallelism, {tokens} tokens, hidden {width}, float32; chunks of 128"
    )
    print(f"{'':<28}{'forward':>9}{'KB':>8}{'backward':>10}{'KB':>8}")
    for name, (forward, sent, backward, sent_back) in found[0].items():
        print(f"{name:<28}{forward:>9}{sent / 1e3:>8.0f}{backward:>10}{sent_back / 1e3:>8.0f}")
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout()):
        steps(repeats, verdicts)
        shim.apply(only=[ID], require=[ID], options={ID: {"fuse": True}})
        on_gpu_counted()
        if not quick:
            heads(repeats, verdicts)
    print("\n" + ("\n".join(f"MISSED: {verdict}" for verdict in verdicts) or "All demands are met."), flush=True)
    return 1 if verdicts else 0


# In the process that is started by hand


def main() -> int:
    parser = parser_of(
        "Losses without logits: stock, the patch and peers, side by side.", RELEASE, peers=True, repeats=5
    )
    parser.add_argument("--quick", action="store_true", help="without the times of heads")
    parser.add_argument("--real", action="store_true", help="heads of real sizes, and nothing else")
    parser.add_argument("--head", default="", help="with --real: tokens,vocabulary,hidden of one head in their place")
    arguments = parser.parse_args()
    if arguments.measure:
        peers_on_path(arguments)
        head = (tuple(map(int, arguments.head.split(","))),) if arguments.head else ()
        return compare(arguments.release, arguments.repeats, arguments.quick, arguments.real, head)
    if arguments.real:  # with the usual allocator: the peak of one side is no memory of the next
        return measured(__file__, arguments, {})
    # Ranks are daemons, which may not have the processes that a parallel compilation starts.
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **ALLOCATOR}
    # Triton decides at its import whether kernels are interpreted.
    return measured(__file__, arguments, settings, {**settings, "TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    raise SystemExit(main())

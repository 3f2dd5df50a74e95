"""The cost of a fix if stock is wrong: operations, messages and bytes of the step that the patch's proof runs.

    python benchmarks/fixes.py [--releases 0.13.1,0.15.3,0.18.2,0.19.2]

Each step on stock and with its patch alone, over gloo on CPU. Stock computes something wrong there, so a difference is
no price by itself; benchmarks/counts.py has the steps that stock does right. The table is Markdown; docs/benchmarks.md
has the conclusions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TOP = str(Path(__file__).resolve().parent.parent)
RELEASES = "0.13.1,0.15.3,0.18.2,0.19.2"
UNITS = ("operations", "messages", "B sent", "B at peak")

Step = Callable[[], Any]


class Case(NamedTuple):
    patch: str
    what: str
    make: Callable[[], Step]  # with a separate model
    layout: Mapping[str, Any] = {}
    options: Mapping[str, Any] | None = None  # of the patch


def proof(patch: str) -> Any:
    return import_module(f"shim.patches.megatron_core.{patch.replace('-', '_')}.proof")


def aux_loss(padding: Sequence[int] = (), **options: Any) -> Step:
    cases = proof("moe-aux-loss-scale")
    model = cases.model_of({**cases.AUX, **options})
    return lambda: cases.step(model, padding)


def sequence_loss(padding: Sequence[int] = ()) -> Step:
    shared = proof("moe-aux-loss-scale")
    model = shared.model_of(proof("seq-aux-loss-scale").SEQUENCES)
    return lambda: shared.step(model, padding, micro_batch_size=2)


def indexer_loss() -> Step:
    cases = proof("dsa-indexer-loss-scale")
    return lambda: cases.gradients(4)


def mrope(**options: Any) -> Step:
    import torch

    cases = proof("mrope-thd")
    model = cases.build(**options)
    ids, labels, places = cases.row_of()
    starts = torch.tensor([0, *cases.LENGTHS]).cumsum(0).tolist()
    here = torch.cat([cases.own(length, start) for length, start in zip(cases.LENGTHS, starts)])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        params = cases.packed_of(cases.LENGTHS)
        model(ids[:, here], places, None, labels=labels[:, here], packed_seq_params=params).sum().backward()

    return step


def latent_attention(**options: Any) -> Step:
    import torch

    from shim.patches.megatron_core import _proof_mla

    with _proof_mla.without_te() as module:
        layer = _proof_mla.build(module, **options)
    hidden = torch.ones(_proof_mla.TOKENS // (2 if options else 1), _proof_mla.BATCH, _proof_mla.HIDDEN)

    def step() -> None:
        with _proof_mla.without_te():
            layer(hidden.clone().requires_grad_(), None)[0].sum().backward()

    return step


def replay() -> Step:
    from megatron.core.transformer.moe import moe_utils

    from shim import testing

    cases = proof("router-replay")
    replays = cases.replay_module()
    replays.RouterReplay.clear_global_router_replay_instances()
    model = testing.build_gpt(**cases.MODEL, **cases.FULL)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with mock.patch.object(moe_utils, "te_general_gemm", None, create=True):
            cases.replay(cases.experts(0))
            loss = cases.losses(model).mean()
            replays.RouterReplay.set_global_router_replay_action(replays.RouterReplayAction.REPLAY_BACKWARD)
            loss.backward()
            replays.RouterReplay.clear_global_router_replay_action()

    return step


def biases() -> Step:
    cases = proof("expert-bias-gradient")
    model = cases.wrapped_model()
    return lambda: cases.step(model)


def virtual_stages() -> Step:
    from shim.patches.megatron_core import _proof_pipelines as pipelines

    model = pipelines.stages()
    return lambda: pipelines.step(model, proof("pipeline-p2p-order").EQUAL)


def multi_token_prediction() -> Step:
    from shim import testing

    cases = proof("mtp-loss-options")
    model = testing.build_gpt(**cases.SIZES, mtp_num_layers=1)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        cases.gradients_of(model)

    return step


def rows_of_corpus(patch: str, pad: int) -> Step:
    """Ask for four rows. The first step, which is not counted, asks for the first row."""
    import tempfile

    from shim.patches.megatron_core._proof_corpus import Tokenizer, gpt_dataset, write_corpus

    cases, folder = proof(patch), tempfile.TemporaryDirectory()
    dataset = gpt_dataset(write_corpus(cases.DOCUMENTS, folder.name), cases.LENGTH, Tokenizer(pad, cases.EOD))

    def step() -> None:
        assert folder  # it goes with its last reference
        for row in range(4):
            dataset[row]

    return step


def resumed(**settings: Any) -> Step:
    """Loading the states of an optimizer and a scheduler, and the scheduler's step."""
    cases = proof("resumed-learning-rate")
    return lambda: cases.resumed(True, **settings)


def padded_depths() -> Step:
    """A step with multi-token prediction of experts, on a row whose padding a mask shows."""
    from shim import testing

    cases = proof("router-padding-mask")
    model = testing.build_gpt(**{**cases.MODEL, "mtp_num_layers": 2})

    def step() -> None:
        model.zero_grad(set_to_none=True)
        cases.gradients(model, 11)

    return step


def half_and_full() -> Step:
    """An optimizer is made for a bf16 model with norms in fp32."""
    cases = proof("fp32-weight-states")

    def step() -> None:
        with cases.fused_adam():
            cases.Training(None, **cases.MIXED)

    return step


def unsharded() -> Step:
    return proof("fsdp-no-shard-gradients").reduced


def one_model(**options: Any) -> Step:
    cases = proof("trackers-of-several-models")
    return lambda: cases.step(**options)


def tower() -> Step:
    import torch

    cases = proof("vit-local-attention")
    model, image = cases.tower(), torch.rand(1, 3, cases.SIZE, cases.SIZE)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(image).sum().backward()

    return step


def sequences_of_a_row(**options: Any) -> Step:
    from shim import testing

    cases = proof("packed-seq-aux-loss")
    wrapped = cases.model_of({**cases.SEQUENCES, **options})
    row = testing.pack(testing.random_sequences(cases.LENGTHS), align=4)
    return lambda: cases.step(wrapped, [row], packed=True)


PER_TOKEN = {"calculate_per_token_loss": True}
CASES: Mapping[int, Sequence[Case]] = {  # by the number of ranks
    1: (
        Case("gpt-dataset-loss-mask", "4 rows", partial(rows_of_corpus, "gpt-dataset-loss-mask", 0)),
        Case("gpt-dataset-pad-token", "4 rows", partial(rows_of_corpus, "gpt-dataset-pad-token", 1)),
        Case("seq-aux-loss-scale", "two sequences", sequence_loss),
        Case("seq-aux-loss-scale", "two sequences, padding mask", partial(sequence_loss, [3, 1])),
        Case("dsa-indexer-loss-scale", "4 microbatches", indexer_loss),
        Case("mrope-thd", "3 sequences", mrope),
        Case("router-replay", "full recompute", replay),
        Case("router-padding-mask", "2 depths of experts, padding mask", padded_depths),
        Case("packed-seq-aux-loss", "3 sequences, 2 layers", sequences_of_a_row),
        Case("resumed-learning-rate", "a resume", partial(resumed, use_checkpoint_opt_param_scheduler=True)),
        Case("fp32-weight-states", "an optimizer is made", half_and_full),
        Case("trackers-of-several-models", "one model", partial(one_model, num_layers=2, mtp_num_layers=1)),
        Case("vit-local-attention", "a tower of two layers", tower),
        Case("mtp-loss-options", "off", multi_token_prediction),
        *(
            Case("mtp-loss-options", option, multi_token_prediction, options={option: True})
            for option in ("detach", "skip_loss")
        ),
    ),
    2: (
        Case("moe-aux-loss-scale", "2 microbatches, CP 2", aux_loss, {"cp": 2}),
        Case("moe-aux-loss-scale", "the same per token", partial(aux_loss, **PER_TOKEN), {"cp": 2}),
        Case(
            "moe-aux-loss-scale",
            "the same per token, padding mask in 2 layers",
            partial(aux_loss, [3, 1], **PER_TOKEN),
            {"cp": 2},
        ),
        Case("mrope-thd", "3 sequences, CP 2", partial(mrope, context_parallel_size=2), {"cp": 2}),
        Case("mla-rope-key-gradient", "TP 2", latent_attention, {"tp": 2}),
        Case(
            "mla-rope-key-gradient",
            "TP 2, SP",
            partial(latent_attention, sequence_parallel=True),
            {"tp": 2, "sequence_parallel": True},
        ),
        Case("expert-bias-gradient", "TP 2, EP 2", biases, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
        Case("pipeline-p2p-order", "PP 2, VP 2", virtual_stages, {"pp": 2, "vp": 2}),
        Case("fsdp-no-shard-gradients", "two buffers", unsharded, {"ep": 2}),
        Case("packed-seq-aux-loss", "3 sequences, 2 layers, CP 2", sequences_of_a_row, {"cp": 2}),
    ),
}


def counted(case: Case, patched: bool) -> tuple[int, ...] | str | None:
    """The units of a step of this rank; the error if it fails, None if the release has no such step."""
    import torch

    import shim
    from shim import testing
    from shim.testing.proof import CannotRunError

    ids = [case.patch]
    with ExitStack() as stack:
        stack.enter_context(testing.megatron_on_cpu())
        stack.enter_context(testing.layout_initialised(testing.Layout(**case.layout)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if patched:
            options = {case.patch: dict(case.options)} if case.options else None
            stack.enter_context(shim.patched(only=ids, require=ids, options=options))
        try:
            step = case.make()
            step()
            found = []
            for _ in range(3):
                with testing.Footprint() as footprint:
                    step()
                messages = footprint.collectives.total()
                found.append((footprint.operations, messages, footprint.message_bytes, footprint.peak_bytes))
        except CannotRunError:
            return None
        except Exception as error:  # noqa: BLE001 - what stock cannot do has no count
            return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return min(found)


def rows(world: int) -> list[tuple[str, str, str]]:
    """(patch, case, differences) on this rank."""
    import shim

    decisions = shim.plan().decisions
    found = []
    for case in CASES[world]:
        if not decisions[case.patch].wanted:
            continue
        stock, mine = counted(case, False), counted(case, True)
        if stock is None or mine is None:
            continue
        if isinstance(stock, str) or isinstance(mine, str):
            differs = f"{stock} on stock, {mine} with the patch"
        else:
            units = UNITS if world == 1 else UNITS[:-1]  # messages under way hold memory for as long as they please
            changes = [f"{b - a:+,} {unit}" for unit, a, b in zip(units, stock, mine) if a != b]
            differs = ", ".join(changes) or "nothing"
        found.append((case.patch, case.what, differs))
    return found


def measure(release: str) -> None:
    import megatron.core.models.gpt.gpt_model  # noqa: F401  what patches wait for

    from shim import testing

    for world in CASES:
        with testing.Ranks(world) as ranks:
            for row in ranks.run(rows, world, timeout=300)[0]:
                print("|", " | ".join((release, *row)), "|", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of fixes if stock is wrong: counts, stock against shim.")
    parser.add_argument("--releases", metavar="A,B", default=RELEASES)
    parser.add_argument("--measure", metavar="RELEASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return 0
    sys.path.insert(0, TOP)
    from shim.testing import environment, fetch

    print("| megatron-core | patch | step | beyond stock |\n|---|---|---|---|", flush=True)
    codes = []
    for release in arguments.releases.split(","):
        command = [sys.executable, "-W", "ignore", __file__, "--measure", release]
        codes.append(subprocess.run(command, env=environment([fetch(release), Path(TOP)])).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())

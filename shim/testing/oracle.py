"""The truth about packed rows: the same sequences alone, normalised as the release normalises a row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import mtp_shift, release
from .packing import PackedRow
from .schedules import run_microbatches

__all__ = ["Result", "differences", "run_alone", "run_packed", "run_schedule", "worst"]

# A model, or a rank's virtual stages of it (`build_chunks`).
Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True)
class Result:
    """The results of one forward and backward pass on this rank, which has T tokens of the row.

    main: loss of every token [T], 0 on padding.
    mtp: per MTP layer, loss of every token [T], 0 for tokens that the rolled loss mask leaves out.
    logged: the losses that the release logs per MTP layer [K], before any reduction over ranks.
    grads: name -> gradient of every trainable weight that got one; this rank's shard for sharded weights. With a list
    of virtual stages, names begin with the stage's number. "decoder_input" is the gradient of that argument.
    On pipeline stages other than the last only `grads` is filled.
    """

    main: Tensor
    mtp: list[Tensor]
    logged: Tensor
    grads: dict[str, Tensor]


def run_packed(
    model: Model,
    row: PackedRow,
    *,
    per_token_loss: bool = False,
    loss_mask: bool = True,
    decoder_input: Tensor | None = None,
) -> Result:
    """Train one step on the packed row, as a trainer would.

    per_token_loss: config.calculate_per_token_loss, and a main loss that is a sum instead of a mean.
    loss_mask: False passes no mask to the model, and counts every token except padding.
    decoder_input: [T, 1, h], embeddings of the whole row for the first stage instead of its embedding, as in
        vision-language trainers. Each rank gets its share.

    Errors of the release pass through (0.12 to 0.15: AssertionError for packing with MTP).
    """
    chunks = _chunks(model)
    view = _RankView(chunks[-1], row, loss_mask)
    with _step(chunks, per_token_loss) as losses, _Pipeline(chunks) as pipeline:
        embeddings = _Embeddings(chunks[0], decoder_input)
        pipeline.forward(
            input_ids=row.input_ids[:, view.index],
            decoder_input=embeddings.take(view.index),
            **_inputs(row, view, loss_mask),
        )
        per_token = [loss.squeeze(0) for loss in losses]
        total = None
        if per_token:
            total = _main_loss(per_token[-1], view, per_token_loss)
        pipeline.backward(total)
        return _result(chunks, per_token, view, _logged_losses(), embeddings)


def run_alone(
    model: Model,
    row: PackedRow,
    *,
    per_token_loss: bool = False,
    loss_mask: bool = True,
    decoder_input: Tensor | None = None,
) -> Result:
    """The truth for `run_packed`: one pass per sequence, one loss over the whole row, one backward.

    The release computes the per-token losses of every unpacked sequence [1, n]. This function does the rest. It puts
    the losses into the row. The main loss is their mean (or sum) over the row. Each MTP layer k adds scaling factor /
    layers * sum over the row / counted tokens; its mask is the loss mask moved left by k tokens inside each sequence,
    or by k + 1 if the model gets tokens in place of labels there (see `mtp_shift`).
    A layer that counts no token adds nothing. Under context parallelism a rank sums over its tokens and divides by
    the count of the whole row, so that the mean over ranks (or the sum, with per_token_loss) equals one rank.
    Sequences get padding at the end only if sequence or context parallelism needs divisible lengths; causal attention
    never sees it. Switch auxiliary losses of a mixture of experts off: they are not per token.
    """
    chunks = _chunks(model)
    view = _RankView(chunks[-1], row, loss_mask)
    config: Any = chunks[-1].config
    depth = config.mtp_num_layers or 0
    # Per-token mode keeps the release from dividing by zero tokens. Its own MTP losses are scaled to zero.
    with _step(chunks, per_token_loss=True, mtp_scale=0.0) as losses, _Pipeline(chunks) as pipeline:
        embeddings = _Embeddings(chunks[0], decoder_input)
        placed = [torch.zeros(len(view.index)) for _ in range(depth + 1)]
        for piece in view.pieces:
            losses.clear()
            pipeline.forward(
                input_ids=piece.take(row.input_ids),
                position_ids=piece.take(row.position_ids),
                attention_mask=None,
                decoder_input=embeddings.take(piece.places),
                labels=piece.take(row.labels),
                loss_mask=piece.take(row.loss_mask),
            )
            for k, loss in enumerate(losses):
                placed[k] = placed[k].index_put((piece.target,), loss.squeeze(0)[piece.kept])
        total, logged = None, torch.zeros(0)
        if losses:
            total = _main_loss(placed[-1], view, per_token_loss)
            first = mtp_shift(chunks[-1])
            averages = [view.mean(loss, k + first) for k, loss in enumerate(placed[:-1])]
            factor = _mtp_factors(config, view, per_token_loss, depth, first)
            for k, average in enumerate(averages):
                total = total + factor[k] * average
            logged = torch.stack(averages).detach() if averages else logged
        pipeline.backward(total)
        return _result(chunks, placed if losses else [], view, logged, embeddings)


def run_schedule(
    model: Model, rows: Sequence[PackedRow], *, per_token_loss: bool = False, loss_mask: bool = True
) -> Result:
    """Train one step on packed rows as microbatches, with the schedule that the release chooses for the layout.

    The schedule is 1F1B under pipeline parallelism, and the interleaved one for a list of virtual stages. Rows may have
    different lengths, except for virtual stages on two ranks: no release can tell messages about shapes apart there.

    Losses are those of the rows, concatenated. `logged` is their sum. Gradients are divided by the number of rows, or
    not divided with per_token_loss. The release does all of this, except the mean or sum over a row.
    """
    from megatron.core import parallel_state

    chunks = _chunks(model)
    views = [_RankView(chunks[-1], row, loss_mask) for row in rows]

    def forward(microbatch: tuple[PackedRow, _RankView], chunk: Any) -> tuple[Tensor, Any]:
        row, view = microbatch
        output = chunk(input_ids=row.input_ids[:, view.index], **_inputs(row, view, loss_mask))

        def loss_of(per_token: Tensor) -> tuple[Any, ...]:
            loss = _main_loss(per_token.squeeze(0), view, per_token_loss)
            if not per_token_loss:
                loss = loss / view.ranks  # the schedule multiplies a mean by the ranks
            count = (view.mask.sum().int(),) if per_token_loss else ()
            return (loss, *count, {"loss": loss.detach()})

        return output, loss_of

    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    with _step(chunks, per_token_loss) as losses, contextlib.ExitStack() as undo:
        settings = {"variable_seq_lengths": len({row.total for row in rows}) > 1}
        if virtual:
            # With two ranks each is both neighbours of the other. Only this setting keeps the messages apart.
            settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        for config in _configs(chunks):
            for name, value in settings.items():
                undo.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        run_microbatches(chunks, list(zip(rows, views, strict=True)), forward, max(row.total for row in rows))
        each = len(losses) // len(rows)
        results = [
            _result(chunks, [loss.squeeze(0) for loss in losses[i * each : (i + 1) * each]], view, torch.zeros(0))
            for i, view in enumerate(views)
        ]
        mtp = [torch.cat(layer) for layer in zip(*(result.mtp for result in results), strict=True)]
        main = torch.cat([result.main for result in results])
        return Result(main=main, mtp=mtp, logged=_logged_losses(), grads=results[0].grads)


def differences(a: Result, b: Result) -> dict[str, float]:
    """The differences between `a` and `b` in losses, logged losses and gradients.

    "main", "mtp" and "logged" are the largest absolute difference over the largest absolute value. "grad" is the norm
    of the difference over the norm, over all gradients together. A missing gradient counts as zero. A NaN anywhere
    gives NaN, which no comparison accepts.

    Raises ValueError if the rows differ in length, or the models in the number of MTP layers.
    """
    names = a.grads.keys() | b.grads.keys()
    wrong, norm = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name in names:
        zero = torch.zeros(())
        left, right = (x.grads.get(name, zero).double() for x in (a, b))
        wrong = wrong + (left - right).square().sum()
        norm = norm + right.square().sum()
    return {
        "main": _relative(a.main, b.main),
        "mtp": _relative(torch.cat([torch.zeros(0), *a.mtp]), torch.cat([torch.zeros(0), *b.mtp])),
        "logged": _relative(a.logged, b.logged),
        "grad": float((wrong / norm).sqrt()) if wrong != 0 else 0.0,
    }


def worst(found: Mapping[str, float]) -> float:
    """The largest difference, NaN if any is NaN, which max() could miss."""
    return float(torch.tensor(list(found.values()), dtype=torch.float64).max())


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ValueError(f"results of different shapes: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.numel() == 0:
        return 0.0
    worst = (a.double() - b.double()).abs().max()
    return float(worst / b.double().abs().max()) if worst != 0 else 0.0


# ---- a rank's part of a row


@dataclass(frozen=True)
class _Piece:
    """The part of one sequence that this rank runs.

    places: positions of its tokens in the row, -1 for padding. kept: which tokens are no padding. target: positions of
    the kept tokens among this rank's tokens of the row.
    """

    places: Tensor
    kept: Tensor
    target: Tensor

    def take(self, values: Tensor) -> Tensor:
        """[1, T] -> [1, tokens of the piece], 0 in padding."""
        return torch.where(self.places >= 0, values[:, self.places.clamp(min=0)], 0)


class _RankView:
    """This rank's tokens of a row, cut as context parallelism cuts it.

    Rank r holds the r-th from the start and the r-th from the end of the 2 * cp chunks of each sequence. Without
    context parallelism it holds all tokens, in order.
    """

    def __init__(self, model: Any, row: PackedRow, use_loss_mask: bool) -> None:
        from megatron.core import parallel_state

        self.row = row
        self.ranks = parallel_state.get_context_parallel_world_size()
        self.rank = parallel_state.get_context_parallel_rank()
        config = model.config
        self._multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        starts = [start for start, _ in row.spans]
        self.index = torch.cat(
            [self._own(torch.arange(start, end)) for start, end in zip(starts, row.ends, strict=True)]
        )
        self.valid = row.valid[self.index]
        self._row_mask = row.loss_mask[0] if use_loss_mask else row.valid.float()
        self.mask = self._row_mask[self.index]
        self.pieces = [
            self._piece(start, length, end) for (start, length), end in zip(row.spans, row.ends, strict=True) if length
        ]

    def _own(self, places: Tensor) -> Tensor:
        if self.ranks == 1:
            return places
        if len(places) % (2 * self.ranks):
            raise ValueError(f"context parallelism {self.ranks} needs sequences padded to {2 * self.ranks}")
        chunks = places.chunk(2 * self.ranks)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]]) if len(places) else places

    def _piece(self, start: int, length: int, end: int) -> _Piece:
        if self.ranks > 1:
            # The same padding as in the row, so that each rank holds the same tokens.
            places = torch.arange(start, end)
        else:
            # Sequence parallelism cuts tokens into equal parts, one per tensor-parallel rank.
            places = torch.arange(start, start + -(-length // self._multiple) * self._multiple)
        places = self._own(torch.where(places < start + length, places, -1))
        kept = places >= 0
        position_of = torch.full((self.row.total,), -1)
        position_of[self.index] = torch.arange(len(self.index))
        return _Piece(places, kept, position_of[places[kept]])

    def mean(self, loss: Tensor, depth: int = 0) -> Tensor:
        """This rank's part of the mean over the row of `loss`, [this rank's tokens]: the mean over ranks is the row's.

        depth: tokens by which the loss mask has moved.
        """
        count = self._rolled_row_mask(depth).sum().clamp(min=1)
        return self.ranks * (loss * self.rolled_mask(depth)).sum() / count

    def count(self, depth: int = 0) -> Tensor:
        """Counted tokens of the whole row over the number of ranks."""
        return self._rolled_row_mask(depth).sum() / self.ranks

    def rolled_mask(self, depth: int) -> Tensor:
        """float32 [this rank's tokens]: the loss mask moved `depth` tokens left inside each sequence."""
        return self._rolled_row_mask(depth)[self.index]

    def _rolled_row_mask(self, depth: int) -> Tensor:
        if depth == 0:
            return self._row_mask
        rolled = torch.zeros(self.row.total)
        for start, length in self.row.spans:
            if length > depth:
                rolled[start : start + length - depth] = self._row_mask[start + depth : start + length]
        return rolled


# ---- losses


def _main_loss(loss: Tensor, view: _RankView, per_token_loss: bool) -> Tensor:
    return (loss * view.mask).sum() if per_token_loss else view.mean(loss)


def _mtp_factors(config: Any, view: _RankView, per_token_loss: bool, depth: int, first: int) -> list[Tensor]:
    """The factor by which the release multiplies the mean loss of each MTP layer, from its code.

    first: by how many tokens the first layer moves the loss mask.
    """
    factors = []
    for k in range(first, first + depth):
        weight = torch.tensor(config.mtp_loss_scaling_factor / depth)
        if per_token_loss:
            # Up to 0.16 the loss is the sum. From 0.17 on it is the mean times the row's counted tokens.
            old = tuple(int(part) for part in release().split(".")[:2]) < (0, 17)
            weight = weight * view.count(k if old else 0)
        factors.append(weight)
    return factors


def _logged_losses() -> Tensor:
    """[K] from the release's tracker; empty if nothing was logged."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    # Renamed in 0.19, and on the dev branch, which keeps the tokens of sums beside them.
    found = (tracker.get(name) for name in ("loss_values", "values", "loss_sums"))
    logged = next((losses for losses in found if losses is not None), None)
    if logged is None:
        return torch.zeros(0)
    tokens = tracker.get("num_tokens")
    return logged.detach().clone() if tokens is None else logged.detach() / tokens.clamp(min=1)


def _result(
    chunks: Sequence[nn.Module],
    losses: Sequence[Tensor],
    view: _RankView,
    logged: Tensor,
    embeddings: _Embeddings | None = None,
) -> Result:
    """`losses` are in the order in which the release computes them: MTP layers first, the main loss last."""
    *mtp, main = [loss.detach() for loss in losses] or [torch.zeros(0)]
    first = mtp_shift(chunks[-1])
    return Result(
        main=main.where(view.valid, torch.zeros(())) if losses else main,
        mtp=[loss.where(view.rolled_mask(k + first) > 0, torch.zeros(())) for k, loss in enumerate(mtp)],
        logged=logged,
        grads={**_gradients(chunks), **(embeddings.gradient() if embeddings else {})},
    )


def _gradients(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A copy of every gradient.

    Under sequence parallelism a rank's gradient of a replicated weight covers only the rank's tokens, and those differ
    if sequences run alone. So such gradients are summed over ranks, as megatron does before a step.
    """
    grads = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        for name, weight in chunk.named_parameters():
            if weight.grad is not None:
                summed = getattr(weight, "sequence_parallel", False)
                grads[prefix + name] = _over_shares(weight.grad) if summed else weight.grad.clone()
    return grads


def _over_shares(grad: Tensor) -> Tensor:
    """The sum of a gradient over the ranks that share the tokens under sequence parallelism."""
    from megatron.core import parallel_state

    summed = grad.clone()
    dist.all_reduce(summed, group=parallel_state.get_tensor_model_parallel_group())
    return summed


# ---- the model's inputs


def _inputs(row: PackedRow, view: _RankView, loss_mask: bool) -> dict[str, Any]:
    """All inputs of a model for a packed row, except its tokens."""
    return {
        "position_ids": row.position_ids[:, view.index],
        "attention_mask": None,
        "labels": row.labels[:, view.index],
        "loss_mask": view.mask.unsqueeze(0) if loss_mask else None,
        "packed_seq_params": row.packed_seq_params(),
    }


class _Embeddings:
    """Embeddings [T, 1, h] instead of tokens, copied so that the copy collects the gradient."""

    def __init__(self, model: Any, given: Tensor | None) -> None:
        self.leaf = None if given is None else given.detach().clone().requires_grad_()
        self.shared = model.config.sequence_parallel

    def take(self, places: Tensor) -> Tensor | None:
        """[places, 1, h] on this rank, zero for a place of -1. Under sequence parallelism only this rank's share."""
        if self.leaf is None:
            return None
        kept = (places >= 0).view(-1, 1, 1)
        taken = torch.where(kept, self.leaf[places.clamp(min=0)], 0)
        if self.shared:
            from megatron.core import parallel_state

            ranks = parallel_state.get_tensor_model_parallel_world_size()
            taken = taken.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return taken

    def gradient(self) -> dict[str, Tensor]:
        if self.leaf is None or self.leaf.grad is None:
            return {}
        return {"decoder_input": _over_shares(self.leaf.grad) if self.shared else self.leaf.grad.clone()}


# ---- one training step


def _chunks(model: Model) -> Sequence[Any]:
    """The virtual stages of this rank, in order. A single model is the only stage."""
    return [model] if isinstance(model, nn.Module) else list(model)


def _configs(chunks: Sequence[nn.Module]) -> list[Any]:
    """Every config of any module, each once. Some are copies of others."""
    return list({id(m.config): m.config for chunk in chunks for m in chunk.modules() if hasattr(m, "config")}.values())


@contextlib.contextmanager
def _step(chunks: Sequence[Any], per_token_loss: bool, mtp_scale: float = 1.0) -> Iterator[list[Tensor]]:
    """Clear gradients and tracker, and set the options. Restores all on exit.

    Yields a list that collects every per-token loss [1, n] with its graph.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    losses: list[Tensor] = []
    model = chunks[-1]
    compute = model.compute_language_model_loss

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        loss = compute(*args, **kwargs)
        losses.append(loss)
        return loss

    with contextlib.ExitStack() as undo:
        for config in _configs(chunks):
            undo.callback(setattr, config, "calculate_per_token_loss", config.calculate_per_token_loss)
            config.calculate_per_token_loss = per_token_loss
        undo.callback(
            setattr, MTPLossAutoScaler, "main_loss_backward_scale", MTPLossAutoScaler.main_loss_backward_scale
        )
        MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(mtp_scale)
        MTPLossLoggingHelper.tracker.clear()
        undo.callback(MTPLossLoggingHelper.tracker.clear)
        previous = vars(model).get("compute_language_model_loss")
        if previous is None:
            undo.callback(delattr, model, "compute_language_model_loss")
        else:
            undo.callback(setattr, model, "compute_language_model_loss", previous)
        model.compute_language_model_loss = recording
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
            undo.callback(chunk.zero_grad, set_to_none=True)
        yield losses


class _Pipeline:
    """Forward and backward of this rank's pipeline stages: passes hidden states on and their gradients back.

    With one stage it only runs the model. All forward passes run first, then all backward passes, in the same order on
    each stage. The last rank is followed by the next virtual stage of the first rank.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        from megatron.core import parallel_state

        self.chunks = chunks
        self.first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if not (self.first and self.last):
            self.previous = parallel_state.get_pipeline_model_parallel_prev_rank()
            self.next = parallel_state.get_pipeline_model_parallel_next_rank()
        self.received: list[list[Tensor]] = [[] for _ in chunks]
        self.sent: list[list[Tensor]] = [[] for _ in chunks]

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.received.clear()
        self.sent.clear()

    def forward(self, *, decoder_input: Tensor | None = None, **inputs: Any) -> None:
        """input_ids: [1, n]. decoder_input is for the first stage only."""
        for number, chunk in enumerate(self.chunks):
            _enter_chunk(number, len(self.chunks))
            extra = {}
            if self.first and number == 0:
                extra = {} if decoder_input is None else {"decoder_input": decoder_input}
            else:
                hidden = self._receive(chunk.config.params_dtype)
                self.received[number].append(hidden)
                chunk.set_input_tensor(hidden)
            output = chunk(**inputs, **extra)
            if not self._ends(number):
                # MTP layers add their states, so the next stage cannot know the shape.
                dist.send(torch.tensor(output.shape), self.next)
                dist.send(output.detach().contiguous(), self.next)
                self.sent[number].append(output)

    def backward(self, total: Tensor | None) -> None:
        """total: the scalar loss on the last stage."""
        for number in reversed(range(len(self.chunks))):
            _enter_chunk(number, len(self.chunks))
            if self._ends(number):
                assert total is not None, "the model computed no loss: compute_language_model_loss was not called"
                total.backward()
            else:
                sent = self.sent[number]
                grads = [torch.empty_like(output) for output in sent]
                for grad in grads:
                    dist.recv(grad, self.next)
                if any(output.requires_grad for output in sent):
                    torch.autograd.backward(sent, grads)
            for hidden in self.received[number]:
                assert hidden.grad is not None
                dist.send(hidden.grad, self.previous)

    def _ends(self, number: int) -> bool:
        return self.last and number == len(self.chunks) - 1

    def _receive(self, dtype: torch.dtype) -> Tensor:
        shape = torch.empty(3, dtype=torch.int64)
        dist.recv(shape, self.previous)
        hidden = torch.empty(shape.tolist(), dtype=dtype)
        dist.recv(hidden, self.previous)
        return hidden.requires_grad_()


def _enter_chunk(number: int, chunks: int) -> None:
    """Set the virtual stage in parallel_state, from which a model up to 0.12 reads it."""
    from megatron.core import parallel_state

    if chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(number)

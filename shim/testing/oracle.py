"""The truth about packed rows: the same sequences run alone, normalised as the release normalises a row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .model import release
from .packing import PackedRow

__all__ = ["Result", "differences", "run_alone", "run_packed", "worst"]


@dataclass(frozen=True)
class Result:
    """What one forward and backward pass gave on this rank, of whose tokens of the row there are T.

    main: loss of every token [T], 0 on padding.
    mtp: per MTP layer, loss of every token [T], 0 where the rolled loss mask does not count it.
    logged: what the release logs per MTP layer [K], before any reduction over ranks.
    grads: gradient of every trainable weight that got one, shards of this rank where weights are sharded.
    On pipeline stages other than the last only `grads` is filled.
    """

    main: Tensor
    mtp: list[Tensor]
    logged: Tensor
    grads: dict[str, Tensor]


def run_packed(model: nn.Module, row: PackedRow, *, per_token_loss: bool = False, loss_mask: bool = True) -> Result:
    """Train one step on the packed row, as a trainer would.

    per_token_loss: config.calculate_per_token_loss, and a main loss that is a sum instead of a mean.
    loss_mask: False passes none to the model, and counts every token that is not padding.

    Whatever the release raises (0.12 to 0.15: AssertionError for packing with MTP) comes through.
    """
    view = _RankView(model, row, loss_mask)
    with _step(model, per_token_loss) as losses, _Pipeline(model) as pipeline:
        pipeline.forward(
            input_ids=row.input_ids[:, view.index],
            position_ids=row.position_ids[:, view.index],
            attention_mask=None,
            labels=row.labels[:, view.index],
            loss_mask=view.mask.unsqueeze(0) if loss_mask else None,
            packed_seq_params=row.packed_seq_params(),
        )
        per_token = [loss.squeeze(0) for loss in losses]
        total = None
        if per_token:
            total = _main_loss(per_token[-1], view.mask, per_token_loss)
        pipeline.backward(total)
        return _result(model, per_token, view, _logged_losses())


def run_alone(model: nn.Module, row: PackedRow, *, per_token_loss: bool = False, loss_mask: bool = True) -> Result:
    """The truth for `run_packed`: a pass for each sequence, one loss over the whole row, one backward.

    The release computes the per-token losses of every unpacked sequence [1, n]; the rest is spelled out here:
    the losses are placed into the row, the main loss is their mean (or sum) over the row, and each MTP layer
    k adds scaling factor / layers * sum over the row / tokens counted, its mask being the loss mask moved k
    tokens to the left inside each sequence. A layer that counts no token adds nothing. Only where sequence or
    context parallelism needs lengths that divide is padding added at the end; causal attention never sees it.
    Auxiliary losses of a mixture of experts are not per token and have no part in this: switch them off.
    """
    view = _RankView(model, row, loss_mask)
    config: Any = model.config
    depth = config.mtp_num_layers or 0
    # Per-token mode keeps the release from dividing by zero tokens; its own MTP losses are scaled to nothing.
    with _step(model, per_token_loss=True, mtp_scale=0.0) as losses, _Pipeline(model) as pipeline:
        placed = [torch.zeros(len(view.index)) for _ in range(depth + 1)]
        for piece in view.pieces:
            losses.clear()
            pipeline.forward(
                input_ids=piece.take(row.input_ids),
                position_ids=piece.take(row.position_ids),
                attention_mask=None,
                labels=piece.take(row.labels),
                loss_mask=piece.take(row.loss_mask),
            )
            for k, loss in enumerate(losses):
                placed[k] = placed[k].index_put((piece.target,), loss.squeeze(0)[piece.kept])
        total, logged = None, torch.zeros(0)
        if losses:
            total = _main_loss(placed[-1], view.mask, per_token_loss)
            averages = [_mean(loss, view.rolled_mask(k + 1)) for k, loss in enumerate(placed[:-1])]
            factor = _mtp_factors(config, view, per_token_loss, depth)
            for k, average in enumerate(averages):
                total = total + factor[k] * average
            logged = torch.stack(averages).detach() if averages else logged
        pipeline.backward(total)
        return _result(model, placed if losses else [], view, logged)


def differences(a: Result, b: Result) -> dict[str, float]:
    """How far `a` is from `b`, by what: losses, logged losses, gradients.

    "main", "mtp" and "logged" are the largest absolute difference over the largest absolute value, "grad" is
    the norm of the difference over the norm, all gradients together. A missing gradient counts as zero; a NaN
    anywhere gives NaN, which no comparison accepts.

    Raises ValueError when the results are of rows of different lengths or of other numbers of MTP layers.
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
    """The largest of some differences, NaN where any of them is: max() would step over it."""
    return float(torch.tensor(list(found.values()), dtype=torch.float64).max())


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ValueError(f"results of different shapes: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.numel() == 0:
        return 0.0
    worst = (a.double() - b.double()).abs().max()
    return float(worst / b.double().abs().max()) if worst != 0 else 0.0


# ---- what a rank sees of a row


@dataclass(frozen=True)
class _Piece:
    """The part of one sequence that this rank runs.

    places: where its tokens lie in the row, -1 for padding. kept: which of them are no padding. target: where
    those lie among this rank's tokens of the row.
    """

    places: Tensor
    kept: Tensor
    target: Tensor

    def take(self, values: Tensor) -> Tensor:
        """[1, T] -> [1, tokens of the piece], 0 in padding."""
        return torch.where(self.places >= 0, values[:, self.places.clamp(min=0)], 0)


class _RankView:
    """This rank's tokens of a row, cut as context parallelism cuts it.

    Of the 2 * cp chunks of each sequence, rank r holds number r from the start and number r from the end.
    Without context parallelism: all tokens, in order.
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
            # Padded as in the row, so that the same rank holds the same tokens.
            places = torch.arange(start, end)
        else:
            # Sequence parallelism cuts tokens into as many equal parts as there are tensor-parallel ranks.
            places = torch.arange(start, start + -(-length // self._multiple) * self._multiple)
        places = self._own(torch.where(places < start + length, places, -1))
        kept = places >= 0
        position_of = torch.full((self.row.total,), -1)
        position_of[self.index] = torch.arange(len(self.index))
        return _Piece(places, kept, position_of[places[kept]])

    def rolled_mask(self, depth: int) -> Tensor:
        """float32 [this rank's tokens]: the loss mask moved `depth` tokens left inside each sequence."""
        rolled = torch.zeros(self.row.total)
        for start, length in self.row.spans:
            if length > depth:
                rolled[start : start + length - depth] = self._row_mask[start + depth : start + length]
        return rolled[self.index]


# ---- losses


def _main_loss(loss: Tensor, mask: Tensor, per_token_loss: bool) -> Tensor:
    summed = (loss * mask).sum()
    return summed if per_token_loss else summed / mask.sum().clamp(min=1)


def _mean(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def _mtp_factors(config: Any, view: _RankView, per_token_loss: bool, depth: int) -> list[Tensor]:
    """What the release multiplies the mean loss of each MTP layer with, as read in its code."""
    factors = []
    for k in range(1, depth + 1):
        weight = torch.tensor(config.mtp_loss_scaling_factor / depth)
        if per_token_loss:
            # Up to 0.16 the sum is left as it is; since 0.17 the mean is taken as often as the row has
            # tokens.
            old = tuple(int(part) for part in release().split(".")[:2]) < (0, 17)
            weight = weight * (view.rolled_mask(k).sum() if old else view.mask.sum())
        factors.append(weight)
    return factors


def _logged_losses() -> Tensor:
    """[K] from the release's tracker; empty where nothing was logged."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    logged = tracker.get("loss_values", tracker.get("values"))  # renamed in 0.19
    return torch.zeros(0) if logged is None else logged.detach().clone()


def _result(model: nn.Module, losses: Sequence[Tensor], view: _RankView, logged: Tensor) -> Result:
    """Losses are in the order the release asks for them: MTP layers first, the main loss last."""
    *mtp, main = [loss.detach() for loss in losses] or [torch.zeros(0)]
    return Result(
        main=main.where(view.valid, torch.zeros(())) if losses else main,
        mtp=[loss.where(view.rolled_mask(k + 1) > 0, torch.zeros(())) for k, loss in enumerate(mtp)],
        logged=logged,
        grads=_gradients(model),
    )


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient.

    Under sequence parallelism a rank's gradient of a replicated weight covers its part of the tokens, another
    part when sequences run alone: those are summed over ranks, as megatron does before a step.
    """
    from megatron.core import parallel_state

    grads = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            grads[name] = weight.grad.clone()
            if getattr(weight, "sequence_parallel", False):
                dist.all_reduce(grads[name], group=parallel_state.get_tensor_model_parallel_group())
    return grads


# ---- one training step


@contextlib.contextmanager
def _step(model: Any, per_token_loss: bool, mtp_scale: float = 1.0) -> Iterator[list[Tensor]]:
    """Clean gradients and tracker, options set, all put back on exit.

    Yields a list that collects every per-token loss [1, n] with its graph.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    losses: list[Tensor] = []
    compute = model.compute_language_model_loss

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        loss = compute(*args, **kwargs)
        losses.append(loss)
        return loss

    with contextlib.ExitStack() as undo:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        for config in configs.values():
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
        model.zero_grad(set_to_none=True)
        undo.callback(model.zero_grad, set_to_none=True)
        yield losses


class _Pipeline:
    """Forward and backward of this rank's pipeline stage: hidden states go on, their gradients come back.

    With one stage it only runs the model. Passes run all forward, then all backward, in the same order on
    each stage.
    """

    def __init__(self, model: Any) -> None:
        from megatron.core import parallel_state

        self.model = model
        self.first = parallel_state.is_pipeline_first_stage()
        self.last = parallel_state.is_pipeline_last_stage()
        self.previous = None if self.first else parallel_state.get_pipeline_model_parallel_prev_rank()
        self.next = None if self.last else parallel_state.get_pipeline_model_parallel_next_rank()
        self.received: list[Tensor] = []
        self.sent: list[Tensor] = []

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.received.clear()
        self.sent.clear()

    def forward(self, *, input_ids: Tensor, **inputs: Any) -> None:
        """input_ids: [1, n]."""
        if not self.first:
            config = self.model.config
            tokens = input_ids.shape[1]
            if config.sequence_parallel:
                tokens //= config.tensor_model_parallel_size
            hidden = torch.empty(tokens, 1, config.hidden_size, dtype=config.params_dtype)
            dist.recv(hidden, self.previous)
            self.received.append(hidden.requires_grad_())
            self.model.set_input_tensor(hidden)
        output = self.model(input_ids=input_ids, **inputs)
        if not self.last:
            dist.send(output.detach().contiguous(), self.next)
            self.sent.append(output)

    def backward(self, total: Tensor | None) -> None:
        """total: the scalar loss on the last stage."""
        if self.last:
            assert total is not None, "the model computed no loss: compute_language_model_loss was not called"
            total.backward()
        else:
            grads = [torch.empty_like(output) for output in self.sent]
            for grad in grads:
                dist.recv(grad, self.next)
            if any(output.requires_grad for output in self.sent):
                torch.autograd.backward(self.sent, grads)
        for hidden in self.received:
            assert hidden.grad is not None
            dist.send(hidden.grad, self.previous)

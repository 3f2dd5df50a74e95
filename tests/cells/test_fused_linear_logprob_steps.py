"""fused-linear-logprob in what a trainer puts around a step: loss masks, main_grad in fp32, recompute, CUDA graphs."""

import contextlib
import inspect

import pytest
import torch
from linear_loss_cases import (
    SP,
    TP,
    build,
    gradients,
    logits_counted,
    off_by,
    on_one_rank,
    patched,
    rows_of,
    summed,
)
from torch.utils.checkpoint import checkpoint

import shim
from shim import ops, testing

CELLS = {"0.12.3": "all"}

HALF = {"bf16": True, "params_dtype": torch.bfloat16}


# ---- loss masks


def masked_step(model, mask):
    """As trainers do it: the mask goes to the model, for MTP, and multiplies the losses."""
    rows, labels = rows_of()
    losses = model(rows, rows, None, labels=labels, loss_mask=mask)
    (losses * mask).sum().backward()
    return losses.detach(), gradients(model)


def mask_of(kept):
    mask = torch.zeros(2, 8)
    mask[0, 3:7] = mask[1, 5:] = kept
    return mask


@contextlib.contextmanager
def products_counted():
    """The numbers of tokens that reach the product, one a call."""
    tokens, linear = [], ops.linear_token_logprobs
    ops.linear_token_logprobs = lambda hidden, *args, **kwargs: (
        tokens.append(hidden.numel() // hidden.size(-1)),
        linear(hidden, *args, **kwargs),
    )[1]
    try:
        yield tokens
    finally:
        ops.linear_token_logprobs = linear


def compared(layout, kept, depths):
    """Per rank: what is off from stock, at the tokens that count, and the tokens of each product."""
    mask, found = mask_of(kept), []
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), products_counted() as tokens:
        for context in (contextlib.nullcontext(), patched(skip_masked=True)):
            with context:
                found.append(masked_step(build(depths, sequence_parallel=layout.sequence_parallel), mask))
    (losses, grads), (fused, fused_grads) = found
    assert not fused[mask == 0].any() and losses.all()
    return off_by((fused, fused_grads), (losses * (mask > 0), grads)), tokens


@pytest.mark.parametrize(
    ("layout", "kept", "depths"), [(TP, 1.0, 1), (SP, 0.5, 2), (SP, 0.0, 1), (TP, 0.0, None)], ids=str
)
def test_tokens_that_a_mask_leaves_out_reach_no_product(ranks2, layout, kept, depths):
    """MTP's mask is rolled, and its last tokens count no more, but have a label. Main tokens: 4 + 3 of 16."""
    for off, tokens in ranks2.run(compared, layout, kept, depths):
        assert off < 3e-6
        assert len(tokens) == 1 + (depths or 0) and all(count <= 7 + 2 * (depths or 0) for count in tokens)


@on_one_rank
def test_labels_below_zero_are_left_out_too():
    rows, labels = rows_of()
    labels[:, 5:] = -100
    with patched():
        computed = summed(build(), rows, labels)
    with patched(skip_masked=True), products_counted() as tokens:
        found = summed(build(), rows, labels)
    assert tokens == [10]
    assert off_by(found, computed) < 2e-6


@on_one_rank
def test_without_the_option_a_mask_changes_nothing():
    """The losses of masked tokens are returned, as on stock."""
    mask = mask_of(1.0)
    stock = masked_step(build(1), mask)
    with patched(), products_counted() as tokens:
        found = masked_step(build(1), mask)
    assert tokens == [16, 16] and off_by(found, stock) < 2e-6 and found[0].all()


@on_one_rank
def test_a_mask_of_another_shape_leaves_out_none(caplog):
    rows, labels = rows_of()
    stock = build()(rows, rows, None, labels=labels, loss_mask=torch.zeros(16))
    with patched(skip_masked=True):
        found = build()(rows, rows, None, labels=labels, loss_mask=torch.zeros(16))
    torch.testing.assert_close(found, stock)
    assert "loss_mask has the shape [16]" in caplog.text


# ---- main_grad


def emulated(total_input, grad_output, main_grad):
    """What the CUDA extension does, which adds to main_grad in fp32."""
    main_grad.add_(grad_output.flatten(0, -2).float().t() @ total_input.flatten(0, -2).float())


class Extension:
    wgrad_gemm_accum_fp32 = staticmethod(emulated)


def of_main_grad(model, fused):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.output_layer.gradient_accumulation_fusion = fused
    rows, labels = rows_of()
    wrapped.zero_grad_buffer()
    wrapped(rows, rows, None, labels=labels).mean().backward()
    return model.shared_embedding_or_output_weight().main_grad.clone()


@on_one_rank
@pytest.mark.parametrize("depths", [None, 1])
def test_main_grad_gets_the_gradient_unrounded(depths, monkeypatch):
    """As by the CUDA extension, which a stand-in emulates on stock. Tied: with what the embedding adds."""
    from megatron.core.tensor_parallel import layers

    def model():
        return build(depths, True, **HALF).bfloat16()

    exact = model().double()
    rows, labels = rows_of()
    exact(rows, rows, None, labels=labels).mean().backward()
    right = exact.shared_embedding_or_output_weight().grad
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", Extension, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    stock = of_main_grad(model(), True)
    with patched(), logits_counted() as calls:
        found = of_main_grad(model(), True)
        rounded = of_main_grad(model(), False)
    assert not calls and stock.dtype == found.dtype == torch.float32
    errors = [float((grad.double() - right).norm() / right.norm()) for grad in (found, stock, rounded)]
    assert errors[0] < 1.2 * errors[1] and errors[0] < 0.02
    # No embedding reaches these rows, so they are what the product alone has added.
    alone = [row for row in range(64) if row not in rows]
    for grad, kept in ((found, False), (stock, False), (rounded, True)):
        assert torch.equal(grad[alone].bfloat16().float(), grad[alone]) is kept


# ---- recompute, CUDA graphs, and what the releases' own losses are


@on_one_rank
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_may_be_recomputed(reentrant):
    rows, labels = rows_of()

    def run(model, again):
        def forward(rows, _):
            return model(rows, rows, None, labels=labels)

        needs = torch.zeros(1, requires_grad=True)  # for the reentrant form
        losses = checkpoint(forward, rows, needs, use_reentrant=reentrant) if again else forward(rows, needs)
        losses.mean().backward()
        return losses.detach(), gradients(model)

    with patched(), logits_counted() as calls:
        once, twice = run(build(1), False), run(build(1), True)
    assert off_by(twice, once) == 0 and not calls


@on_one_rank
@pytest.mark.parametrize(("depths", "skips"), [(1, False), (None, True)])
def test_the_host_reads_nothing_and_no_shape_hangs_on_data(depths, skips):
    """A CUDA graph needs both. Tensors of the meta device have no values, so reading one is an error."""
    model = build(depths).eval().to("meta")  # in training, MTP's log is on another device
    rotary = model.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.to("meta")
    rows = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    refused = pytest.raises(NotImplementedError, match="nonzero") if skips else contextlib.nullcontext()
    with patched(skip_masked=skips), logits_counted() as calls, refused:
        losses = model(rows, rows, None, labels=rows)
        losses.mean().backward()
        assert losses.shape == (2, 8) and model.output_layer.weight.grad.shape == (64, 16)
    assert not calls


def test_the_releases_loss_has_no_smoothing_no_z_loss_and_no_temperature():
    """So there is nothing of these for the patch to take over. A release that has one makes this fail."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    body = inspect.getsource(LanguageModule.compute_language_model_loss)
    assert "cross_entropy" in body
    for word in ("smoothing", "z_loss", "temperature", "softcap"):
        assert word not in body
    assert list(inspect.signature(LanguageModule.compute_language_model_loss).parameters) == [
        "self",
        "labels",
        "logits",
    ]
    assert shim.plan()["fused-linear-logprob"].action == "apply"

"""router-padding-mask: the ids of padding matter to no router, under recompute, parallelism and in packed rows."""

import contextlib
import copy
import warnings

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_router_losses import AUX, model_of, off_by, places_of_rank, step
from shim.patches.megatron_core.router_padding_mask.proof import (
    MODEL,
    TOKENS,
    eager,
    gradients,
    moved,
    of_a_gpt_model,
    on_a_later_stage,
)
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "router-padding-mask"
pytestmark = needed(ID)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TP = Layout(tp=2, sequence_parallel=True)
# What full recompute of MTP needs on some releases.
OTHERS = [name for name in ("mtp-recompute", "expert-bias-padding") if shim.plan()[name].wanted]


@pytest.fixture
def one(one_rank):
    with eager():
        yield


def applied(*others):
    return shim.patched(only=[ID, *others], require=[ID])


@contextlib.contextmanager
def inside(layout):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), eager():
        yield


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, FULL, MOE, {"moe_z_loss_coeff": 0.1}], ids=["", "full", "moe", "z-loss"])
def test_ids_of_padding_do_not_matter(one, options):
    with applied(*OTHERS):
        assert of_a_gpt_model(**options) < 1e-6
        assert moved(lambda: testing.build_gpt(**{**MODEL, "mtp_num_layers": 2, **options}), "decoder") < 1e-6


@pytest.mark.parametrize("options", [FULL, MOE], ids=["full", "moe"])
def test_recompute_changes_no_bit(one, options):
    def run(**options):
        return gradients(testing.build_gpt(**{**MODEL, "mtp_num_layers": 2, **options}), 11)

    with applied(*OTHERS):
        assert same(run(**options), run())


def test_a_mask_without_padding_is_no_mask(one):
    """The end of a row that has none counts as on stock."""

    def run(mask):
        model = testing.build_gpt(**MODEL)
        row = torch.arange(TOKENS)[None]
        model(row, row, None, labels=row.roll(-1), padding_mask=mask).mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    stock = run(None)
    with applied():
        assert same(run(None), stock)
        assert same(run(torch.zeros(1, TOKENS, dtype=torch.bool)), stock)


def test_nothing_stays_behind(one):
    """A row without a mask after one with one, and after an exception."""

    def plain():
        model = testing.build_gpt(**MODEL)
        row = torch.arange(TOKENS)[None]
        model(row, row, None, labels=row.roll(-1)).mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    stock = plain()
    with applied():
        model = testing.build_gpt(**MODEL)
        gradients(model, 11)
        before = copy.copy(vars(model.mtp.layers[0]))

        def fail(*_):
            raise KeyboardInterrupt

        handle = model.mtp.layers[0].register_forward_hook(fail)
        with handle, pytest.raises(KeyboardInterrupt):
            gradients(model, 11)
        assert vars(model.mtp.layers[0]).keys() == before.keys()
        assert same(plain(), stock)


def trained(layout, options, padding=(3, 1)):
    """After a step on two rows: the gradients of MTP's routers, and their masks with the places of this rank."""
    with inside(layout), shim.patched(only=[ID, *OTHERS]):
        wrapped = model_of({**AUX, "mtp_num_layers": 2, **options})
        masks = []
        routers = [module for name, module in wrapped.named_modules() if "mtp." in name and name.endswith("mlp.router")]
        for router in routers:
            router.register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1].clone()))
        step(wrapped, padding)
        return [router.weight.main_grad.clone() for router in routers], masks, places_of_rank()


@pytest.mark.parametrize(
    ("layout", "options"),
    [(TP, {}), (TP, FULL), (Layout(pp=2), {})],
    ids=["tp2", "tp2, recompute", "pp2"],
)
def test_gradients_are_those_of_one_rank(ranks2, layout, options):
    """Also at the ends of the ranks' shares, and with the mask on a stage that is not the first."""
    truth, *_ = trained(Layout(), options)
    with_mtp = [found for found, *_ in ranks2.run(trained, layout, options) if found]
    assert len(with_mtp) == layout.tp
    for found in with_mtp:
        assert all(off_by(one, other) < 1e-5 for one, other in zip(found, truth, strict=True))


def test_masks_under_context_parallelism(ranks2):
    """A rank has a chunk from the front of a row and one from its end, whose neighbours are on the other rank."""
    _, truth, _ = trained(Layout(), {})
    # Two rows, of which 3 tokens and 1 are padding, and two depths: at the end of a row the next token is none.
    assert sorted(int(mask.sum()) for mask in truth) == [2, 3, 4, 5]
    for _, masks, places in ranks2.run(trained, Layout(cp=2), {}):
        assert len(masks) == len(truth)
        assert all(torch.equal(mask, whole[places]) for mask, whole in zip(masks, truth, strict=True))


def test_a_later_stage_under_sequence_parallelism(ranks2):
    (truth,) = ranks2.run(of_a_stage, Layout())[:1]
    for found in ranks2.run(of_a_stage, TP):
        assert off_by(found, truth) < 1e-5


def of_a_stage(layout):
    with inside(layout), applied():
        return on_a_later_stage()


def of_a_whole_hybrid_model(layout):
    """The gradients of the router of a hybrid model without MTP, whose mask no stage cuts, by its auxiliary loss."""
    with inside(layout), applied():
        cut = layout.sequence_parallel
        model = testing.build_hybrid("*E", **{**MODEL, "num_layers": 2}, sequence_parallel=cut)
        row = torch.arange(TOKENS)[None]
        (model(row, row, None, labels=row, padding_mask=row > 5).sum() * 0.0).backward()
        return [weight.grad for name, weight in model.named_parameters() if "router.weight" in name]


def test_a_hybrid_model_under_sequence_parallelism(ranks2):
    truth = ranks2.run(of_a_whole_hybrid_model, Layout())[0]
    found = ranks2.run(of_a_whole_hybrid_model, TP)
    summed = [sum(parts) for parts in zip(*found, strict=True)]
    assert all(off_by(one, other) < 1e-5 for one, other in zip(summed, truth, strict=True))


class TakesNoMask(GPTModel):
    def forward(self, input_ids, position_ids, attention_mask, labels=None):
        return None


class TakesTheMask(GPTModel):
    def forward(self, input_ids, position_ids, attention_mask, labels=None, padding_mask=None):
        return None


@pytest.mark.parametrize(("kind", "state"), [(TakesNoMask, "applied"), (TakesTheMask, "unknown")])
def test_a_forward_pass_of_a_trainer_is_asked_for_its_mask(one, kind, state):
    with shim.patched(only=[ID], require=[ID]):
        model = model_of({**MODEL, "mtp_num_layers": 1}).module
        model.__class__ = kind
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert shim.check(model)[ID].state == state

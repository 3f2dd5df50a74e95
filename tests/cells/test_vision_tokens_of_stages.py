"""vision-tokens-of-stages: a stage without the tower counts what the tower gives; other counts are stock's."""

import inspect
from importlib import import_module

import pytest
import torch

import shim
from shim.patches.megatron_core.vision_tokens_of_stages import proof

try:
    LLaVAModel = import_module("megatron.core.models.multimodal.llava_model").LLaVAModel
except ImportError:
    pytest.skip("vision towers of this release need Transformer Engine", allow_module_level=True)

CELLS = {"0.19.2": "all"}

ID = "vision-tokens-of-stages"
DYNAMIC = "temporal_patch_dim" in inspect.signature(LLaVAModel).parameters
pytestmark = pytest.mark.usefixtures("one_rank")

KEPT = [("radio", {}), ("cradio-g", {})]
if "use_vision_backbone_fp8_arch" in inspect.signature(LLaVAModel).parameters:
    KEPT += [(tower, {"use_vision_backbone_fp8_arch": True}) for tower in ("radio", "cradio-g")]


def stage(monkeypatch, tower, *, first, **options):
    """The first or the last of two stages."""
    monkeypatch.setattr(proof, "_stage", lambda _: (first, not first))
    return proof.llava(tower, **options)


def tokens(model):
    """That the tower gives for an image."""
    return model.vision_model(torch.zeros(1, 3, 2 * proof.PATCH, 2 * proof.PATCH)).shape[1]


@pytest.mark.parametrize(("tower", "options"), KEPT)
def test_each_stage_counts_what_the_tower_gives(monkeypatch, tower, options):
    with shim.patched(only=[ID], require=[ID]):
        first = stage(monkeypatch, tower, first=True, **options)
        last = stage(monkeypatch, tower, first=False, **options)
    assert last.img_seq_len == first.img_seq_len == tokens(first)


@pytest.mark.skipif(not DYNAMIC, reason="this release takes the number from the type alone")
@pytest.mark.parametrize("tower", ["radio", "cradio-g"])
def test_the_number_of_a_config_counts(monkeypatch, tower):
    config = proof._config
    monkeypatch.setattr(proof, "_config", lambda **options: _with_class_tokens(config(**options), 3))
    with shim.patched(only=[ID], require=[ID]):
        first, last = (stage(monkeypatch, tower, first=first) for first in (True, False))
    assert last.img_seq_len == first.img_seq_len == tokens(first) == 4 + 3


def _with_class_tokens(config, number):
    config.class_token_len = number
    return config


def test_radio_g_has_five_class_tokens(monkeypatch):
    """Its tower needs Transformer Engine's norm."""
    with shim.patched(only=[ID], require=[ID]):
        assert stage(monkeypatch, "radio-g", first=False).img_seq_len == 4 + 5


@pytest.mark.parametrize("tower", ["radio", "internvit"])
def test_a_count_without_class_tokens_is_stocks(monkeypatch, tower):
    def count():
        return stage(monkeypatch, tower, first=False, drop_vision_class_token=True).img_seq_len

    stock = count()
    with shim.patched(only=[ID], require=[ID]):
        assert count() == stock == 4


def dynamic(monkeypatch, sizes, tiles, count=None):
    """Labels of the last stage for a row with two images, with and without the patch.

    sizes: of the images. tiles: their number of tiles. count: that a trainer sets for `img_seq_len`.
    """
    offsets = torch.tensor([0, *proof.PATCHES]).cumsum(0).int()
    text = torch.tensor([proof.TEXT])
    given = {
        "images": torch.zeros(0),
        "input_ids": text,
        "position_ids": None,
        "attention_mask": None,
        "labels": text.clamp(min=0),
        "loss_mask": torch.ones(text.shape),
        "num_image_tiles": torch.tensor(tiles, dtype=torch.int),
        "vision_packed_seq_params": offsets,
    }
    given |= {} if sizes is None else {"imgs_sizes": torch.tensor(sizes).reshape(-1, 2)}

    def labels():
        model = stage(monkeypatch, "radio", first=False, drop_vision_class_token=True, dynamic_resolution=True)
        if count:
            model.img_seq_len = count
        model.language_model.forward = lambda labels, **ignored: labels
        return model(**given)[0]

    stock = labels()
    with shim.patched(only=[ID], require=[ID]):
        return stock, labels()


@pytest.mark.skipif(not DYNAMIC, reason="this release takes no images of their own sizes")
def test_a_trainer_that_gives_the_last_stage_counts_keeps_them(monkeypatch):
    """As Megatron-Bridge does. The labels are those that the patch gives a last stage with sizes."""
    bridge, found = dynamic(monkeypatch, None, proof.PATCHES, count=1)
    assert torch.equal(bridge, found)
    stock, found = dynamic(monkeypatch, proof.SIZES, [1, 1])
    assert torch.equal(bridge, found)
    assert not torch.equal(stock, found)


@pytest.mark.skipif(not DYNAMIC, reason="this release takes no images of their own sizes")
def test_sizes_of_no_image_change_nothing(monkeypatch):
    """Of a batch of which each image is one tile."""
    stock, found = dynamic(monkeypatch, [], [1, 1])
    assert torch.equal(stock, found)

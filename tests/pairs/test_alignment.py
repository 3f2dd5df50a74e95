"""The multiples of shim.ops against what megatron-core and Transformer Engine say themselves, and TE's own packing."""

import importlib
from importlib.metadata import version

import pytest
import torch
import transformer_engine_torch as tex
from megatron.core import enums
from transformer_engine.common import recipe as recipes

from shim.ops import Packing, fp8_alignment

CELLS = "every"

TE = tuple(int(part) for part in version("transformer_engine").split(".")[:2])
CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
HERE = {name: getattr(recipes, of_te)() for name, of_te in CLASSES.items() if hasattr(recipes, of_te)}
each_recipe = pytest.mark.parametrize("name", list(HERE))


def of_upstream(module, name):
    """A function of this release, or a skip where it has none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this release has no {module}.{name}")


@each_recipe
def test_an_object_is_what_its_name_is(name):
    assert fp8_alignment(HERE[name]) == fp8_alignment(name)


@each_recipe
def test_it_is_a_multiple_of_what_te_pads_experts_to(name):
    said = of_upstream("transformer_engine.pytorch.quantization", "get_align_size_for_quantization")(HERE[name])
    assert fp8_alignment(name) % said == 0
    # Blockwise is about what is gathered, of which experts' tokens are not; and 2.11 to 2.14 took 64 for NVFP4.
    if name != "blockwise" and not (name == "nvfp4" and TE < (2, 15)):
        assert fp8_alignment(name) == said


def test_a_custom_recipe_says_it_itself():
    custom = of_upstream("transformer_engine.common.recipe", "CustomRecipe")
    if TE < (2, 19):
        with pytest.raises(ValueError, match="CustomRecipe has no known alignment"):
            fp8_alignment(custom(qfactory=lambda role: None))
        return
    assert fp8_alignment(custom(qfactory=lambda role: None)) == 128
    assert fp8_alignment(custom(qfactory=lambda role: None, quantization_alignment=48)) == 48


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_it_is_a_multiple_of_what_megatron_core_pads_to_in_fp8(name):
    said = of_upstream("megatron.core.fp8_utils", "get_fp8_align_size")(getattr(enums.Fp8Recipe, name))
    assert fp8_alignment(getattr(enums.Fp8Recipe, name)) == fp8_alignment(name)
    assert fp8_alignment(name) % said == 0 and (name == "blockwise" or fp8_alignment(name) == said)


def test_it_is_what_megatron_core_pads_to_in_fp4():
    assert fp8_alignment("nvfp4") == of_upstream("megatron.core.fp4_utils", "get_fp4_align_size")("nvfp4")


@pytest.mark.parametrize(
    ("name", "module", "quantizer", "options"),
    [
        ("mxfp8", "mxfp8_tensor", "MXFP8Quantizer", {}),
        ("blockwise", "float8_blockwise_tensor", "Float8BlockQuantizer", {"rowwise": True, "columnwise": True}),
    ],
)
def test_te_quantizes_that_many_tokens_and_no_fewer(name, module, quantizer, options):
    found = of_upstream(f"transformer_engine.pytorch.tensor.{module}", quantizer)
    if not hasattr(found, "is_quantizable") or TE < (2, 5):
        pytest.skip("this release does not say what it quantizes")
    made = found(tex.DType.kFloat8E4M3, **options)
    tokens = fp8_alignment(name)
    assert made.is_quantizable(torch.empty(tokens, 256))
    assert not made.is_quantizable(torch.empty(tokens // 2, 256))


# TE's own packing, which loops


def test_the_zigzag_is_that_of_te(monkeypatch):
    place = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
    padded, positions, on_rank = (
        of_upstream(place, name)
        for name in ("pad_thd_sequences_for_cp", "generate_positional_ids_for_cp", "get_batch_on_this_cp_rank")
    )
    lengths, cp = [5, 8, 3, 13], 2
    mask = torch.arange(13) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, 53).view(4, 13)
    packing = Packing.from_mask(mask, cp=cp)
    # TE takes the sequences without padding, one after another.
    plain = ids[mask]
    expected, labels, offsets = padded(plain, plain, packing.cu_seqlens, 2 * cp, padding_label_id=0)
    assert torch.equal(packing.pack(ids), expected) and torch.equal(packing.cu_seqlens_padded, offsets)
    counted = positions(packing.cu_seqlens, 2 * cp)  # counts on through padding
    assert torch.equal(packing.positions, counted.where(packing.valid, 0))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: cp)
    for rank in range(cp):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        share, _, place_of = on_rank(offsets, expected[None], labels[None], counted)
        assert torch.equal(packing.on_rank(rank).pack(ids), share[0])
        assert torch.equal(packing.on_rank(rank).split(counted), place_of)

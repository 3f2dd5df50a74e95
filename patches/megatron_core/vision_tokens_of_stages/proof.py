"""Proofs of vision-tokens-of-stages: the loss of two pipeline stages is that of one rank."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shim import testing
from shim.testing import Layout
from shim.testing.model import ON_CPU, _config, _seed_weights, _stage
from shim.testing.proof import CannotRunError, Here, LacksFeatureError, proof
from shim.testing.schedules import run_microbatches

IMAGE, PATCH, LONGEST = -200, 16, 64  # the id of an image in the text, pixels, and tokens
TEXT = [5, 3, 8, IMAGE, 9, 2, 7, IMAGE, 6, 4, 1]
SMALL = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}
ALONE = {"pipeline_model_parallel_size": 1, "mtp_num_layers": None, **ON_CPU}
# Sizes in pixels of two images of a row of patches, and how many patches each has.
SIZES, PATCHES = [(32, 48), (16, 32)], [6, 2]


def towers() -> Any:
    """The module of LLaVAModel."""
    try:
        return import_module("megatron.core.models.multimodal.llava_model")
    except ImportError as error:
        raise CannotRunError("vision towers of this release need Transformer Engine") from error


def llava(tower: str, **options: Any) -> Any:
    """This rank's stage of a LLaVAModel, of which the first has the tower. Images have 2 x 2 patches."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.mlp import MLPSubmodules

    module = towers()
    specs: Any = import_module("megatron.core.models.vision.vit_layer_specs")
    language_spec: Any = gpt_layer_specs.get_gpt_layer_local_spec()
    vision_spec = specs.get_vit_layer_with_local_spec()
    for spec in (language_spec, vision_spec):
        spec.submodules.self_attention.submodules.core_attention = testing.CPUCoreAttention
    vision = _config(**SMALL, **ALONE)
    vision.vision_model_type = tower
    linear: Any = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    first, last = _stage(None)
    with (
        mock.patch.object(module, "TEDotProductAttention", testing.CPUCoreAttention, create=True),
        mock.patch.object(module, "HAVE_TE", True, create=True),
    ):
        model = module.LLaVAModel(
            language_transformer_config=_config(num_layers=2, mtp_num_layers=None, **ON_CPU),
            language_transformer_layer_spec=language_spec,
            language_vocab_size=64,
            language_max_sequence_length=LONGEST,
            vision_transformer_config=vision,
            vision_transformer_layer_spec=vision_spec,
            vision_projection_config=_config(num_layers=1, **ALONE),
            vision_projection_layer_spec=MLPSubmodules(**linear),
            language_position_embedding_type="rope",
            pre_process=first,
            post_process=last,
            add_encoder=first,
            img_h=2 * PATCH,
            img_w=2 * PATCH,
            patch_dim=PATCH,
            image_token_index=IMAGE,
            vision_projection_type="mlp",
            **{"drop_vision_class_token": False, **options},
        )
    model.model_type = ModelType.encoder_or_decoder  # which trainers set
    if first:
        model.vision_model.training = False  # or RADIO crops its positions at random
    parts: list[nn.Module | None] = [model.language_model, model.vision_model, model.vision_projection]
    for part in parts:
        if part is not None:
            _seed_weights(part, 7, False)
    return model


def loss(tower: str, dynamic: bool, options: dict[str, Any]) -> list[float]:
    """Of a row of text with two images, on the rank with the last stage. dynamic: images of their own sizes."""
    from megatron.core.packed_seq_params import PackedSeqParams

    takes = inspect.signature(towers().LLaVAModel).parameters
    if not options.keys() <= takes.keys():
        raise LacksFeatureError(f"LLaVAModel takes no {', '.join(options.keys() - takes.keys())}")
    model = llava(tower, **options)
    text = torch.tensor([*TEXT, 3])
    given: dict[str, Any] = {
        "input_ids": text[None, :-1],
        "position_ids": torch.arange(len(TEXT))[None],
        "attention_mask": None,
        "labels": text[None, 1:],
        "loss_mask": torch.ones(1, len(TEXT)),
        "num_image_tiles": torch.ones(2, dtype=torch.int),
    }
    generator = torch.Generator().manual_seed(0)
    given["images"] = torch.randn(2, 3, 2 * PATCH, 2 * PATCH, generator=generator)
    if dynamic:
        offsets, longest = torch.tensor([0, *PATCHES]).cumsum(0).int(), torch.tensor(max(PATCHES))
        row: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
        given["images"] = torch.randn(1, sum(PATCHES), 3 * PATCH * PATCH, generator=generator)
        given["imgs_sizes"] = torch.tensor(SIZES)
        given["vision_packed_seq_params"] = PackedSeqParams("thd", **row, max_seqlen_q=longest, max_seqlen_kv=longest)

    def forward(_: None, chunk: Any) -> tuple[Tensor, Any]:
        losses, mask = chunk(**given)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, float]]:
            found = (losses * mask).sum() / mask.sum()
            return found, {"loss": float(found.detach())}

        return losses, mean

    return [logged["loss"] for logged in run_microbatches(model, [None], forward, LONGEST)]


def error(here: Here, tower: str, dynamic: bool = False, **options: Any) -> float:
    """How far the loss of two stages is from that of one rank."""
    ((right,),) = here.run(loss, tower, dynamic, options)
    _, (found,) = here.run(loss, tower, dynamic, options, layout=Layout(pp=2))
    return abs(found / right - 1)


@proof("loss off by {:.1e}", bound=1e-5, ranks=2)
def class_tokens_on_two_stages(here: Here) -> float:
    """LLaVAModel with a RADIO tower puts labels in wrong places on a pipeline stage without the tower.

    To reproduce: build a LLaVAModel of the type "radio" with `drop_vision_class_token=False` on two pipeline stages,
    the tower on the first one (`add_encoder`), and train a row of text with two images. Compare the loss with that of
    one rank.

    `__init__` sets `class_token_len` beside the tower, so that the last stage counts one class token for each image in
    place of 8, and its labels and loss mask do not fit the outputs. Right is the loss of one rank. From 0.12 on.
    """
    return error(here, "radio")


@proof("loss off by {:.1e}", bound=1e-5, ranks=2, te=True, variants=["v0_12"])
def class_tokens_on_two_stages_beside_transformer_engine(here: Here) -> float:
    """LLaVAModel with a RADIO tower puts labels in wrong places on a pipeline stage without the tower.

    To reproduce: as above, beside Transformer Engine, without which 0.12 cannot import LLaVAModel.
    """
    return error(here, "radio")


@proof("loss off by {:.1e}", bound=1e-5, ranks=2, variants=["v0_18"])
def images_of_their_own_sizes_on_two_stages(here: Here) -> float:
    """LLaVAModel with images of their own sizes puts labels in wrong places on a stage without the tower.

    To reproduce: build a LLaVAModel of the type "radio" with `dynamic_resolution=True` and
    `drop_vision_class_token=True` on two pipeline stages, the tower on the first one. Train a row of text with two
    images of 32 x 48 and 16 x 32 pixels, which `imgs_sizes` and `vision_packed_seq_params` describe. Compare the loss
    with that of one rank.

    `forward` counts the tokens of each image beside the tower. The last stage gives both the number of an image of
    `img_h` x `img_w`. Right is the loss of one rank. From 0.18 on.
    """
    return error(here, "radio", dynamic=True, dynamic_resolution=True, drop_vision_class_token=True)


@proof(
    "loss off by {:.1e}",
    bound=1e-5,
    ranks=2,
    defect="crash",
    crashes=r"^RuntimeError: shape mismatch",
    variants=["v0_15", "v0_18"],
)
def more_class_tokens_of_cradio(here: Here) -> float:
    """LLaVAModel of the type "cradio-g" raises if its tower has another number of class tokens than 8.

    To reproduce: build a LLaVAModel of the type "cradio-g" with `use_vision_backbone_fp8_arch=True`, with which the
    tower has 16, and `drop_vision_class_token=False`. Train a row of text with an image.

    `get_num_image_embeddings` counts 8 for this type, whatever it is given. Right are the outputs of the tower. From
    0.16 on.
    """
    return error(here, "cradio-g", use_vision_backbone_fp8_arch=True)

"""The number of tokens that a vision tower gives for an image, on pipeline stages without the tower.

What is wrong (0.12 to 0.20): LLaVAModel learns beside its tower how many tokens an image becomes. A pipeline stage
without the tower counts on its own, and wrongly in two cases. The last stage then puts labels and loss mask in wrong
places, in silence.

1. A RADIO tower keeps its class tokens (`drop_vision_class_token=False`): such a stage counts one for an image, and the
   tower has 8 or 5. Of the type "cradio-g" each stage counts 8, also where the tower has another number (from 0.15 on
   under FP8, from 0.16 on with `use_vision_backbone_fp8_arch`), and the first one raises.
2. Images have sizes of their own (`imgs_sizes` with `vision_packed_seq_params`, from 0.18 on): such a stage counts the
   tokens of an image of `img_h` x `img_w` for each.

What the patch does: a model counts the class tokens of its config where it is built, and a stage without a tower counts
the tokens of each image where it is called with `imgs_sizes`. A trainer whose last stage gets no `imgs_sizes`, as
Megatron-Bridge's, sets `img_seq_len` itself, and keeps that.

Upstream: open.

Delete when: a release counts the tokens of images without its tower, and those before it are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, by_name, replacing

MODEL = "megatron.core.models.multimodal.llava_model:LLaVAModel"
CLASS_TOKENS = {"radio": 8, "radio-g": 5, "cradio-g": 8}
ONE_TOKEN_EACH = "_shim_one_token_each"  # of tiles that are tokens


def _init(original: Function, of_fp8: bool, of_config: bool) -> Function:
    named, patch_dim_of = by_name(original), argument(original, "patch_dim")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        model, given = args[0], named(args, kwargs)
        config = given["vision_transformer_config"]
        model._shim_patch_dim = patch_dim_of(args, kwargs)
        tower = config.vision_model_type
        # Pixels are shuffled without class tokens.
        if tower not in CLASS_TOKENS or given.get("drop_vision_class_token") or given.get("pixel_shuffle"):
            return
        own = CLASS_TOKENS[tower]
        if of_config:
            own = getattr(config, "class_token_len", own)
        if of_fp8 and (config.fp8 or given.get("use_vision_backbone_fp8_arch")):
            own = 32 if config.fp8_recipe == "mxfp8" else 16
        counted = own if model.add_encoder else 1
        model.img_seq_len += own - (8 if tower == "cradio-g" else counted)

    return __init__


def _forward(original: Function) -> Function:
    sizes_of, row_of = argument(original, "imgs_sizes"), argument(original, "vision_packed_seq_params")
    frames_of, ids_of = argument(original, "num_frames"), argument(original, "input_ids")
    with_tiles = replacing(original, "num_image_tiles")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        model, sizes = args[0], sizes_of(args, kwargs)
        if model.add_encoder or not model.post_process or sizes is None or row_of(args, kwargs) is None:
            return original(*args, **kwargs)
        if len(sizes) == 0 or (model.temporal_patch_dim > 1 and frames_of(args, kwargs) is not None):
            return original(*args, **kwargs)
        sizes = torch.as_tensor(sizes) // model._shim_patch_dim
        tiles = sizes[:, 0] * sizes[:, 1] // (4 if model._pixel_shuffle else 1)
        tiles = tiles.to(ids_of(args, kwargs).device, torch.int)
        setattr(tiles, ONE_TOKEN_EACH, True)
        args, kwargs = with_tiles(args, kwargs, tiles)
        return original(*args, **kwargs)

    return forward


def _preprocess_data(original: Function) -> Function:
    tiles_of, with_one_token = argument(original, "num_image_tiles"), replacing(original, "is_packed_dynamic_res")

    @functools.wraps(original)
    def _preprocess_data(*args: Any, **kwargs: Any) -> Any:
        if hasattr(tiles_of(args, kwargs), ONE_TOKEN_EACH):
            args, kwargs = with_one_token(args, kwargs, True)
        return original(*args, **kwargs)

    return _preprocess_data


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    init = functools.partial(_init, of_fp8=variant != "v0_12", of_config=variant == "v0_18")
    if variant != "v0_18":
        return {f"{MODEL}.__init__": init}
    return {
        f"{MODEL}.__init__": init,
        f"{MODEL}.forward": _forward,
        f"{MODEL}._preprocess_data": _preprocess_data,
    }

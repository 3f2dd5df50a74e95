"""A drawn training step of a LLaVAModel with shim, and the truth of it: one rank, one sample at a time, fp64.

The truth calls the language model, the tower and the projection itself and puts the images into the text, so that it
needs neither LLaVAModel's forward pass nor its masks.
"""

import functools
from contextlib import ExitStack
from unittest import mock

import torch
from drawn_steps import VERSION
from drawn_towers import IMAGE, LONGEST, sample
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision import vit_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from whole_steps import _part, here

import shim
from shim.testing import Layout
from shim.testing.attention import CPUCoreAttention
from shim.testing.model import _config, _global_names, _seed_weights, _stage
from shim.testing.schedules import run_microbatches

PARTS = ("language_model", "vision_model", "vision_projection")


def built(step, plain=False):
    """The LLaVAModel of this rank. plain: as the truth has it, without recompute and with no mask on the tower."""

    def config(options, **more):
        options = {name: value for name, value in options.items() if not (plain and name.startswith("recompute"))}
        doubles = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
        return _config(mtp_num_layers=None, **{**options, **doubles, **more})

    language = config(step.language, **({"sequence_parallel": False} if plain else {}))
    alone = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    small = {"hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}
    vision = config(step.vision, **small, **alone)
    vision.vision_model_type = step.tower
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = CPUCoreAttention
    tower_spec = vit_layer_specs.get_vit_layer_with_local_spec()
    if plain:
        tower_spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    height, width = step.image
    first, last = _stage(None)
    with ExitStack() as stack:
        # Transformer Engine's attention and norms, of which a model asks, are those of a CPU.
        for name, value in {
            "TEDotProductAttention": CPUCoreAttention,
            "HAVE_TE": True,
            "is_te_min_version": lambda *_: True,
            "CLIPViTModel": functools.partial(
                llava_model.CLIPViTModel, ln_pre_impl=WrappedTorchNorm, ln_post_impl=WrappedTorchNorm
            ),
        }.items():
            stack.enter_context(mock.patch.object(llava_model, name, value, create=True))
        model = llava_model.LLaVAModel(
            language_transformer_config=language,
            language_transformer_layer_spec=spec,
            language_vocab_size=64,
            language_max_sequence_length=LONGEST,
            vision_transformer_config=vision,
            vision_transformer_layer_spec=tower_spec,
            vision_projection_config=config(step.projection, **alone),
            vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            pre_process=first,
            post_process=last,
            add_encoder=first,
            img_h=height,
            img_w=width,
            patch_dim=step.patch,
            image_token_index=IMAGE,
            **step.whole,
        )
    model = model.double().train()
    model.model_type = ModelType.encoder_or_decoder  # which trainers set
    if first:
        model.vision_model.training = False  # or RADIO crops its positions at random
    for part in PARTS:
        if getattr(model, part) is not None:
            _seed_weights(getattr(model, part), 7, _tied(step) and part == "language_model")
    return model


def _tied(step):
    return step.whole["share_embeddings_and_output_weights"]


def named(step, model):
    """(name on every layout, weight, config of its part) of each weight of this rank."""
    for part in PARTS:
        if getattr(model, part) is not None:
            for name, weight in _global_names(getattr(model, part), _tied(step) and part == "language_model"):
                yield f"{part}.{name}", weight, getattr(model, part).config


def freeze(step, model):
    model.freeze("language" in step.frozen, "tower" in step.frozen, step.frozen == "projection")
    for name, weight, _ in named(step, model):
        if step.frozen == "patches" and name.startswith("vision_model.") and ".decoder." not in name:
            weight.requires_grad_(False)


def truth(step):
    """Name -> whole gradient of each weight that the step trains; and the loss of each row, by replica and number."""
    per_token = step.language["calculate_per_token_loss"]
    with here(Layout(), ""), shim.patched(only=[]):
        model = built(step, plain=True)
        freeze(step, model)
        trained = {name for name, weight, _ in named(step, model) if weight.requires_grad}
        model.requires_grad_(True)  # stock loses some gradients beside frozen weights
        losses, counted, rows = {}, 0, 0
        for replica, numbers in enumerate(step.rows):
            for number, row in enumerate(numbers):
                samples = [sample(step, replica, number, which) for which in range(len(row))]
                count = sum(one.counted.sum() for one in samples)
                loss = sum(alone(model, one) for one in samples) / (1 if per_token else count)
                loss.backward()
                losses[replica, number] = float(loss.detach())
                counted, rows = counted + count, rows + 1
        whole = counted if per_token else rows
        right = {name: weight.grad / whole for name, weight, _ in named(step, model) if weight.grad is not None}
        return {name: gradient for name, gradient in right.items() if name in trained}, losses


def alone(model, one):
    """The sum of a sample's losses."""
    tokens = one.tokens.where(one.tokens != IMAGE, torch.tensor(0))[None]
    text = model.language_model.embedding(tokens, torch.arange(tokens.numel())[None])  # [n, 1, h]
    images = iter(())
    if one.tiles:
        seen = model.vision_model(one.pictures)
        seen = seen[:, model.vision_model.class_token_len :] if model._drop_vision_class_token else seen
        seen = llava_model.pixel_shuffle(seen) if model._pixel_shuffle else seen
        seen = model.vision_projection(seen.transpose(0, 1).contiguous()).transpose(0, 1)  # [tiles, n, h]
        images = iter(seen.split(one.tiles))
    parts, places, end = [], [], 0
    for place, token in enumerate(one.tokens.tolist()):
        parts.append(next(images).flatten(0, 1)[:, None] if token == IMAGE else text[place : place + 1])
        end += len(parts[-1])
        places.append(end - 1)
    labels, mask = torch.zeros(1, end, dtype=torch.long), torch.zeros(1, end).double()
    labels[0, places], mask[0, places] = one.labels.clamp(min=0), one.counted
    losses = model.language_model(None, None, None, decoder_input=torch.cat(parts), labels=labels)
    return (losses * mask).sum()


def batch(step, model, replica, number):
    """What LLaVAModel gets for a row, and how many tokens its loss counts. Samples are filled up to one length."""
    samples = [sample(step, replica, number, which) for which in range(len(step.rows[replica][number]))]
    width = max(len(one.tokens) for one in samples)
    if VERSION < (0, 18):  # from there on it fills up what does not divide
        longest = width + max(sum(one.tiles) * model.img_seq_len - len(one.tiles) for one in samples)
        width += -longest % (step.layout.tp if step.layout.sequence_parallel else 1)

    def filled(name):
        lists = [getattr(one, name) for one in samples]
        return torch.stack([torch.nn.functional.pad(values, (0, width - len(values))) for values in lists])

    given = {
        "images": torch.cat([one.pictures for one in samples]),
        "input_ids": filled("tokens"),
        "position_ids": torch.arange(width).expand(len(samples), -1),
        "attention_mask": None,
        "labels": filled("labels"),
        "loss_mask": filled("mask"),
        "num_image_tiles": torch.tensor([tiles for one in samples for tiles in one.tiles], dtype=torch.int),
    }
    return given, sum(one.counted.sum() for one in samples)


def found(step):
    """((replica, number), loss) of each row of this rank, if it has the last stage, after the step with shim; and
    (name, gradient, part of the whole) of each trained weight, as of `whole_steps.found`."""
    shim.apply()
    with here(step.layout, ""):
        model = built(step)
        freeze(step, model)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        wrapped.zero_grad_buffer()
        wrapped.config.finalize_model_grads_func = finalize_model_grads
        per_token = step.language["calculate_per_token_loss"]
        replica = parallel_state.get_data_parallel_rank()

        def forward(number, chunk):
            given, count = batch(step, model, replica, number)
            output, mask = chunk(**given)

            def loss_of(losses):
                loss = (losses * mask).sum()
                logged = loss.detach() / (1 if per_token else count)
                if step.layout.cp > 1:
                    torch.distributed.all_reduce(logged, group=parallel_state.get_context_parallel_group())
                logged = {"row": (replica, number), "loss": float(logged)}
                return (loss, mask.sum().int(), logged) if per_token else (loss / count, logged)

            return output, loss_of

        logged = run_microbatches(wrapped, range(len(step.rows[replica])), forward, LONGEST)
        shares = [
            (name, weight.main_grad.clone(), _part(name, weight, config))
            for name, weight, config in named(step, model)
            if weight.requires_grad
        ]
        return [(row["row"], row["loss"]) for row in logged], shares

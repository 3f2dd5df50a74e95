"""Proofs of moved-symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from shim.testing.layout import Layout
from shim.testing.model import ON_CPU
from shim.testing.proof import Here, proof

CORE = "megatron.core."
POINTS = torch.linspace(-4, 4, 33, dtype=torch.float64)


def named(module: str, name: str) -> Any:
    """What `from megatron.core.MODULE import NAME` gives."""
    return getattr(import_module(CORE + module), name)


def unwraps() -> bool:
    config = named("transformer.transformer_config", "TransformerConfig")(
        num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    model = torch.nn.Linear(2, 2)
    wrapped = named("transformer.module", "Float16Module")(config, model)
    unwrap = named("utils", "unwrap_model")
    (first,) = unwrap([wrapped])
    return unwrap(wrapped) is model and first is model and unwrap(model) is model


def of_groups() -> Any:
    return named("parallel_state", "get_tensor_model_parallel_group")()


def takes_the_default_group() -> bool:
    take = named("utils", "get_tensor_model_parallel_group_if_none")
    group = of_groups()
    return take(None) is group and take(group) is group


def tells_experimental_features() -> bool:
    config: Any = import_module(CORE + "config")
    before = config.ENABLE_EXPERIMENTAL
    try:
        named("config", "set_experimental_flag")(True)
        return config.ENABLE_EXPERIMENTAL is True and named("config", "is_experimental_enabled")() is True
    finally:
        config.ENABLE_EXPERIMENTAL = before


def activates(module: str, name: str, expected: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with torch.compiler.set_stance("force_eager"):  # some are compiled on first use, for many seconds
        return torch.allclose(named(module, name)(POINTS), expected(POINTS), atol=1e-6)


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def by_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x * x, torch.zeros_like(x))


def tells_virtual_stages(name: str, expected: tuple[bool, ...]) -> bool:
    tell = named("pipeline_parallel.utils", name)
    return tuple(tell(stage, 3) for stage in range(3)) == expected and tell(None, None) and tell(0, 1)


def tracks_losses_of_experts() -> bool:
    return isinstance(named("transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker")(), dict)


def is_the_same_norm() -> bool:
    try:
        norm = named("extensions.transformer_engine", "TENorm")
    except ModuleNotFoundError as error:
        if error.name != "transformer_engine":
            raise
        return True  # 0.12 and 0.13 have neither module without Transformer Engine
    return named("transformer.custom_layers.transformer_engine", "TENorm") is norm


SYMBOLS: dict[str, Callable[[], bool]] = {
    "utils:unwrap_model": unwraps,
    "utils:get_pg_size": lambda: named("utils", "get_pg_size")(of_groups()) == 1,
    "utils:get_pg_rank": lambda: named("utils", "get_pg_rank")(of_groups()) == 0,
    "utils:get_tensor_model_parallel_group_if_none": takes_the_default_group,
    "config:set_experimental_flag": tells_experimental_features,
    "activations:quick_gelu": functools.partial(activates, "activations", "quick_gelu", by_sigmoid),
    "activations:fast_gelu": functools.partial(activates, "activations", "fast_gelu", by_tanh),
    "activations:squared_relu": functools.partial(activates, "activations", "squared_relu", squared),
    "fusions.fused_bias_geglu:quick_gelu": functools.partial(
        activates, "fusions.fused_bias_geglu", "quick_gelu", by_sigmoid
    ),
    "pipeline_parallel.utils:is_pp_first_stage": lambda: named("pipeline_parallel.utils", "is_pp_first_stage")(
        of_groups()
    ),
    "pipeline_parallel.utils:is_pp_last_stage": lambda: named("pipeline_parallel.utils", "is_pp_last_stage")(
        of_groups()
    ),
    "pipeline_parallel.utils:is_vp_first_stage": functools.partial(
        tells_virtual_stages, "is_vp_first_stage", (True, False, False)
    ),
    "pipeline_parallel.utils:is_vp_last_stage": functools.partial(
        tells_virtual_stages, "is_vp_last_stage", (False, False, True)
    ),
    "transformer.moe.moe_utils:get_moe_layer_wise_logging_tracker": tracks_losses_of_experts,
    "transformer.custom_layers.transformer_engine:TENorm": is_the_same_norm,
}


def missing() -> list[str]:
    """The symbols that cannot be imported, or that do something else than they should."""

    def there(works: Callable[[], bool]) -> bool:
        try:
            return works()
        except (ImportError, AttributeError):
            return False

    return [name for name, works in SYMBOLS.items() if not there(works)]


@proof("{:.0f} of 15 names not there", right="all names there", defect="missing")
def names_of_other_releases_are_there(here: Here) -> float:
    """Names that trainers import are missing from releases that could have them.

    To reproduce: `from megatron.core.utils import unwrap_model` on 0.13 is an ImportError. So are the functions of
    megatron.core.activations, `quick_gelu` of fused_bias_geglu before 0.15, is_pp_first_stage, is_pp_last_stage,
    is_vp_first_stage and is_vp_last_stage of pipeline_parallel.utils before 0.14; get_pg_size, get_pg_rank,
    get_tensor_model_parallel_group_if_none of utils, set_experimental_flag of config and
    get_moe_layer_wise_logging_tracker of moe_utils before 0.13; and all of custom_layers.transformer_engine from 0.17
    on.

    Right: each name is there, and does what the release does that has it. unwrap_model gives the model itself, also
    from a list; a name for something that the release has elsewhere is that very object.
    """
    return float(len(here.run(missing)[0]))


def error_of_the_activation() -> float:
    """As trainers take it: under a guard, with plain GELU in its place."""
    try:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
    except ImportError:
        quick_gelu = torch.nn.functional.gelu
    return float((quick_gelu(POINTS) - by_sigmoid(POINTS)).abs().max())


@proof("activations off by {:.1e}", bound=1e-6, variants=("v0_12", "v0_13", "v0_14"))
def a_guarded_import_gives_the_activation_it_names(here: Here) -> float:
    """A model that asks for quick_gelu computes plain GELU, and nothing says so.

    To reproduce on 0.14 or before: import `quick_gelu` from megatron.core.fusions.fused_bias_geglu under a guard that
    takes torch's gelu in its place, as Megatron-Bridge does, and compute it for values between -4 and 4.

    Right is x * sigmoid(1.702 x). 0.14 has the function in megatron.core.activations alone.
    """
    found: float = here.run(error_of_the_activation)[0]
    return found


PP, VP = 2, 2


def expected_layers(layers: int, with_ends: bool) -> dict[tuple[int, int], tuple[int, int]]:
    """(virtual stage, pipeline rank) -> (number of layers, index of the first), by dealing out a row of slots.

    with_ends: the embedding and the loss each take a separate slot, at the ends of the row.
    """
    row: list[int | None] = [*range(layers)]
    if with_ends:
        row = [None, *row, None]
    each = len(row) // (PP * VP)
    found = {}
    for chunk in range(PP * VP):
        held = [layer for layer in row[chunk * each : (chunk + 1) * each] if layer is not None]
        found[divmod(chunk, PP)] = len(held), held[0]
    return found


def chunked_config(layers: int, **more: Any) -> Any:
    """The configuration of a small model whose layers are dealt out to all chunks."""
    return named("transformer.transformer_config", "TransformerConfig")(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=PP,
        virtual_pipeline_model_parallel_size=VP,
        pipeline_dtype=torch.float32,
        **more,
    )


def wrong_chunks(own_rank: bool) -> int:
    """Chunks whose layers are miscounted, on this rank.

    own_rank: ask for the chunks of this rank. Otherwise this rank asks for those of all ranks.
    """
    build = named("transformer.transformer_block", "get_num_layers_to_build")
    offset = named("transformer.transformer_layer", "get_transformer_layer_offset")
    specs = named("models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec")
    here = named("parallel_state", "get_pipeline_model_parallel_rank")()
    wrong = 0
    for layers, with_ends in ((8, False), (6, True)):
        with_experts = [0, 0, 0, 1, 1, 1, 1, 0][:layers]  # no two chunks are alike
        config = chunked_config(
            layers,
            account_for_embedding_in_pipeline_split=with_ends,
            account_for_loss_in_pipeline_split=with_ends,
            num_moe_experts=2,
            moe_layer_freq=with_experts,
            add_bias_linear=False,
        )
        for (stage, rank), expected in expected_layers(layers, with_ends).items():
            where = {"vp_stage": stage} if own_rank else {"vp_stage": stage, "pp_rank": rank}
            if rank == here or not own_rank:
                count, first = expected
                wrong += (build(config, **where), offset(config, **where)) != expected
                found = [
                    spec.submodules.mlp.module.__name__ == "MoELayer"
                    for spec in specs(config, use_transformer_engine=False, **where).layer_specs
                ]
                wrong += found != with_experts[first : first + count]
    return wrong


REFUSED = r"^TypeError: get_\w+\(\) got an unexpected keyword argument '{}'"


@proof(
    "{:.0f} chunks with other layers",
    right="every chunk has its layers",
    defect="crash",
    crashes=REFUSED.format("vp_stage"),
    ranks=2,
    variants=("v0_12",),
)
def a_virtual_stage_is_named_by_an_argument(here: Here) -> float:
    """The layers of a virtual pipeline stage cannot be asked for by `vp_stage` on 0.12.

    To reproduce: on two ranks with `virtual_pipeline_model_parallel_size=2`, call `get_num_layers_to_build(config,
    vp_stage=0)`, `get_transformer_layer_offset(config, vp_stage=0)` and `get_gpt_decoder_block_spec(config,
    use_transformer_engine=False, vp_stage=0)`. Each raises a TypeError before 0.13, where they read the global virtual
    rank of parallel_state instead.

    Right: layers, embedding and loss dealt out to the chunks in their order. 8 layers give the first rank layers 0, 1
    and 4, 5. With `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` both count as a
    layer.
    """
    return float(sum(here.run(wrong_chunks, True, layout=Layout(pp=PP, vp=VP))))


@proof(
    "{:.0f} chunks with other layers",
    right="every chunk has its layers",
    defect="crash",
    crashes=REFUSED.format("(vp_stage|pp_rank)"),
    ranks=2,
    variants=("v0_12", "v0_13", "v0_14"),
)
def the_layers_of_another_rank_can_be_asked_for(here: Here) -> float:
    """The layers of another pipeline rank cannot be asked for by `pp_rank` before 0.15.

    To reproduce: on two ranks, call `get_num_layers_to_build(config, vp_stage=0, pp_rank=1)`,
    `get_transformer_layer_offset(config, vp_stage=0, pp_rank=1)` and `get_gpt_decoder_block_spec(config,
    use_transformer_engine=False, vp_stage=0, pp_rank=1)` on both. Trainers that convert weights do so, because one rank
    names the layers of all. Some layers have experts, so that the specs of the layers tell which they are.

    Right: as the rank itself would count them.
    """
    return float(sum(here.run(wrong_chunks, False, layout=Layout(pp=PP, vp=VP))))


CHUNKED = 8  # layers, of a model that is built


def misbuilt_chunks() -> int:
    """Chunks of this rank that have other layers than they should, built as on later releases."""
    state: Any = import_module(CORE + "parallel_state")
    specs: Any = import_module(CORE + "models.gpt.gpt_layer_specs")
    block = named("transformer.transformer_block", "TransformerBlock")
    config = chunked_config(CHUNKED, **ON_CPU)
    rank, wrong = state.get_pipeline_model_parallel_rank(), 0
    for stage in range(VP):
        state.set_virtual_pipeline_model_parallel_rank(stage)
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        model = named("models.gpt.gpt_model", "GPTModel")(config, spec, 64, 16, vp_stage=stage)
        count, first = expected_layers(CHUNKED, with_ends=False)[stage, rank]
        right = [*range(first + 1, first + 1 + count)]
        for built in (model.decoder, block(config, spec, vp_stage=stage)):
            wrong += [layer.layer_number for layer in built.layers] != right
        # Without a layer of multi-token prediction there is nothing to build.
        given = {"use_transformer_engine": False, "vp_stage": stage}
        wrong += specs.get_gpt_mtp_block_spec(config, spec, **given) is not None
    return wrong


@proof(
    "{:.0f} chunks with other layers",
    right="every chunk has its layers",
    defect="crash",
    crashes=r"^TypeError: .*got an unexpected keyword argument 'vp_stage'",
    ranks=2,
    variants=("v0_12",),
)
def a_virtual_stage_is_built_by_an_argument(here: Here) -> float:
    """A model of a virtual pipeline stage cannot be built with `vp_stage` on 0.12.

    To reproduce: on two ranks with `virtual_pipeline_model_parallel_size=2`, call `get_gpt_decoder_block_spec(config,
    use_transformer_engine=False, vp_stage=0)`, then `GPTModel(..., vp_stage=0)` with it, TransformerBlock and
    `get_gpt_mtp_block_spec`. Each raises a TypeError before 0.13, where they read the virtual rank of parallel_state.

    Right: the chunk has the layers that are dealt out to it.
    """
    return float(sum(here.run(misbuilt_chunks, layout=Layout(pp=PP, vp=VP))))

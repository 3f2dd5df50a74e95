"""How a release could tell of the stage that is asked for under pipeline_model_parallel_layout."""

RELEASE = "0.19.2"
OFFSET = "megatron.core.transformer.transformer_layer:get_transformer_layer_offset"
LAYERS = "megatron.core.transformer.transformer_block:get_num_layers_to_build"
MTP = "megatron.core.transformer.multi_token_prediction:get_mtp_num_layers_to_build"
LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"
BUILT = "config.pipeline_model_parallel_layout.get_num_layers_to_build(layer_type=LayerType.{}, vp_stage=vp_stage{})"
BEFORE = "config.pipeline_model_parallel_layout.get_layer_offset(layer_type=LayerType.decoder, vp_stage=vp_stage{})"


def given(how):
    return {
        OFFSET: [(BEFORE.format(""), BEFORE.format(how))],
        LAYERS: [(BUILT.format("decoder", ""), BUILT.format("decoder", how))],
        MTP: [(BUILT.format("mtp", ""), BUILT.format("mtp", how))],
    }


def positional(name, layer):
    return (
        f"config.pipeline_model_parallel_layout.{name}(layer_type=LayerType.{layer}, vp_stage=vp_stage)",
        f"config.pipeline_model_parallel_layout.{name}(LayerType.{layer}, vp_stage, pp_rank)",
    )


TOLD = "    config.pipeline_model_parallel_layout and setattr(config.pipeline_model_parallel_layout, 'asked_rank', pp_rank)\n"
ASKED = [
    (
        "        pp_rank = parallel_state.get_pipeline_model_parallel_rank()",
        "        pp_rank = getattr(self, 'asked_rank', None)\n        self.asked_rank = None\n"
        "    if pp_rank is None:\n        pp_rank = parallel_state.get_pipeline_model_parallel_rank()",
    )
]

FIXES = {
    "gives the rank by name": given(", pp_rank=pp_rank"),
    "gives the rank in a mapping": given(", **{'pp_rank': pp_rank}"),
    "gives the rank by position": {
        OFFSET: [positional("get_layer_offset", "decoder")],
        LAYERS: [positional("get_num_layers_to_build", "decoder")],
        MTP: [positional("get_num_layers_to_build", "mtp")],
    },
    "reads the layout itself": {
        OFFSET: [
            (
                "            offset = " + BEFORE.format(""),
                "            stages, virtual = (config.pipeline_model_parallel_layout.layout, vp_stage or 0)\n"
                "            earlier = [stages[p][v] for v in range(virtual) for p in range(len(stages))]\n"
                "            earlier += [stages[p][virtual] for p in range(pp_rank)]\n"
                "            offset = sum((stage.count(LayerType.decoder) for stage in earlier))",
            )
        ],
        LAYERS: [
            (
                "        return " + BUILT.format("decoder", ""),
                "        if pp_rank is None:\n            pp_rank = parallel_state.get_pipeline_model_parallel_rank()\n"
                "        return config.pipeline_model_parallel_layout.layout[pp_rank][vp_stage or 0].count(LayerType.decoder)",
            )
        ],
        MTP: [
            (
                "        num_layers_to_build = " + BUILT.format("mtp", ""),
                "        pp_rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank\n"
                "        num_layers_to_build = config.pipeline_model_parallel_layout.layout[pp_rank][vp_stage or 0].count(LayerType.mtp)",
            )
        ],
    },
    "tells the layout before it asks": {
        OFFSET: [("    if pp_rank is None:", TOLD + "    if pp_rank is None:")],
        LAYERS: [
            (
                "    if config.pipeline_model_parallel_layout is not None:",
                TOLD + "    if config.pipeline_model_parallel_layout is not None:",
            )
        ],
        MTP: [
            (
                "    if config.pipeline_model_parallel_layout is not None:",
                TOLD + "    if config.pipeline_model_parallel_layout is not None:",
            )
        ],
        f"{LAYOUT}.get_layer_offset": ASKED,
        f"{LAYOUT}.get_num_layers_to_build": ASKED,
    },
}

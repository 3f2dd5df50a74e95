"""Training steps with random options, drawn by a seed: what each is, and in words.

One rank can compute each of them with one sequence at a time: only what adds up over sequences is drawn. A loss that a
router takes over a whole row needs rows of one sequence, for instance; the rules stand where they apply.
"""

import random
from dataclasses import dataclass, field

import torch
from drawn_more import KNOWN, VERSION, with_more

from shim.testing import Layout

KINDS = ("dense", "moe", "moe", "mla", "mla moe", "hybrid", "hybrid moe", "mamba", "delta")
# Up to 0.16 hybrid models take no loss mask.
LATER = {"hybrid": (0, 17), "hybrid moe": (0, 17), "mamba": (0, 17), "delta": (0, 16)}
OPTIMIZERS = ("plain", "distributed", "offloaded")  # the last: distributed, with a half on the CPU
if VERSION < (0, 13):  # whose distributed optimizer needs Transformer Engine
    OPTIMIZERS = ("plain",)
STACKS = {"hybrid": "*-*-", "hybrid moe": "*E*E", "mamba": "M*M-"}  # of layers
FROZEN = ("lora", "embedding", "norms", "half", "decoder")
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
}
MLA = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8}
MLA |= {"qk_pos_emb_head_dim": 8, "rope_type": "rope", "num_query_groups": 4}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 4}


@dataclass(frozen=True)
class Step:
    """A training step.

    kind: of the model, one of KINDS. world: the number of ranks. options: for what builds the model. rows: for each
    data-parallel rank and microbatch the lengths of the sequences in its row. packed: whether the rows have offsets.
    align, total: their padding, as of `testing.pack`. masked: whether routers get a padding mask. prompts: whether a
    loss mask leaves out a part of the sequences. frozen: which weights are not trained, "" for none. optimizer: "" for
    a step that ends with gradients. descent: its rule. clip: the norm to which it clips gradients, 0 for none. ddp: how
    gradients are summed, for the config of DDP. untrained: the microbatches whose mask leaves out every token.
    """

    seed: int
    kind: str
    layout: Layout
    world: int
    options: dict
    rows: tuple
    packed: bool
    align: int
    total: int
    masked: bool
    prompts: bool
    frozen: str
    optimizer: str
    descent: str = "adam"
    clip: float = 0.0
    ddp: dict = field(default_factory=dict)
    untrained: tuple = ()

    def __str__(self):
        said = [self.kind, str(self.layout), f"{self.world} ranks", f"rows {self.rows} of {self.total} tokens"]
        said += [word for word in ("packed", "masked", "prompts") if getattr(self, word)]
        words = ("frozen", "optimizer", "clip", "ddp", "untrained")
        said += [f"{word}: {getattr(self, word)}" for word in words if getattr(self, word)]
        said += [self.descent] if self.optimizer else []
        sizes = MLA | DELTA | MAMBA
        said += [f"{name}={value}" for name, value in self.options.items() if name not in sizes or sizes[name] != value]
        return ", ".join(said)


def layouts(kind):
    """Those of up to four ranks that this kind of model has."""
    one, staged = [Layout(), Layout()], [Layout(pp=2), Layout(pp=2, vp=2)]
    if kind == "delta":
        parallel = [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(tp=2, pp=2, sequence_parallel=True)]
        return one + staged + parallel + ([Layout(cp=2)] if VERSION >= (0, 18) else [])
    found = one + [Layout(tp=2, sequence_parallel=True), Layout(tp=4, sequence_parallel=True)]
    found += [Layout(cp=2), Layout(cp=4), Layout(tp=2, cp=2, sequence_parallel=True)]
    if "moe" in kind:
        found += [Layout(ep=2), Layout(ep=4), Layout(cp=2, ep=2)]
        found += [Layout(tp=2, ep=2, etp=etp, sequence_parallel=True) for etp in (1, 2)]
    else:  # experts need sequence parallelism beside tensor parallelism
        found += [Layout(tp=2), Layout(tp=2, cp=2)]
    if kind in STACKS:  # build_hybrid builds no virtual stages
        staged = [Layout(pp=2)]
    found += [*staged, Layout(pp=4), Layout(pp=2, cp=2), Layout(tp=2, pp=2, sequence_parallel=True)]
    return found + ([Layout(pp=2, ep=2)] if "moe" in kind else [])


def draw(seed):
    """The step of this seed on this release."""
    choose = random.Random(seed)
    kind = choose.choice([kind for kind in KINDS if LATER.get(kind, VERSION) <= VERSION])
    layout = choose.choice(layouts(kind))
    experts, latent, hybrid = "moe" in kind, "mla" in kind, "hybrid" in kind
    world = layout.world * (choose.choice([1, 2]) if layout.world <= 2 else 1)
    number = choose.choice([layout.pp, 2 * layout.pp])
    # Multi-latent attention of 0.12 takes no packed rows.
    packed = kind != "delta" and choose.random() < 0.6 and ("mla" not in kind or VERSION >= (0, 13))
    rows = tuple(
        tuple(_lengths(choose, packed) for _ in range(number))
        for _ in range(world // (layout.tp * layout.cp * layout.pp))
    )
    alone = all(len(row) == 1 for one in rows for row in one)
    optimizer = choose.choice(["", "", *OPTIMIZERS]) if kind != "delta" else ""  # which loses digits of fp32
    options = _model(choose, kind, layout)
    # The optimizers take no weights in fp64.
    options["params_dtype"] = options["pipeline_dtype"] = torch.float32 if optimizer else torch.float64
    mtp = choose.choice([0, 0, 1, 2]) if kind != "delta" else 0
    if mtp:
        options["mtp_num_layers"] = mtp
    # A mask leaves out the last token of a row in multi-token prediction if padding follows, and counts it alone.
    masked = experts and not mtp and VERSION >= (0, 16) and choose.random() < 0.7
    total = 64
    if experts:
        options |= _experts(choose, layout, options["calculate_per_token_loss"], packed, alone, masked)
        # Tokens are dropped by how many a rank has, so that each has to have a whole sequence.
        if layout.tp * layout.cp == 1 and kind == "moe" and not packed and not masked and choose.random() < 0.5:
            options |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": choose.random() < 0.5}
            rows, total = tuple(((24,),) * number for _ in rows), 24
    if not hybrid and kind != "mamba":
        options |= _recompute(choose, kind)
    options |= _rarer(random.Random(f"rarer {seed}"), kind, layout, options)
    frozen = choose.choice(FROZEN) if choose.random() < 0.3 else ""
    if frozen == "lora" and (experts or latent or kind in ("mamba", "delta")):
        frozen = "half"
    align = 2 * layout.cp * (layout.tp if layout.sequence_parallel else 1)
    prompts = choose.random() < 0.5
    step = Step(seed, kind, layout, world, options, rows, packed, align, total, masked, prompts, frozen, optimizer)
    return with_more(random.Random(f"more {seed}"), step)


def _lengths(choose, packed):
    """Of the sequences of a row."""
    if not packed:
        return (choose.choice([16, 24, 48]) if choose.random() < 0.5 else choose.randint(3, 40),)
    return tuple(choose.randint(2, 10) for _ in range(choose.randint(1, 4)))


def _model(choose, kind, layout):
    stages = layout.pp * layout.vp
    options = {
        "num_layers": stages * (choose.choice([1, 2]) if stages < 4 else 1),
        "calculate_per_token_loss": choose.random() < 0.5,
        "normalization": choose.choice(["LayerNorm", "RMSNorm"]),
        "sequence_parallel": layout.sequence_parallel,
        "share_embeddings_and_output_weights": choose.random() < 0.5,
    }
    if choose.random() < 0.4:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if choose.random() < 0.3 and kind in ("dense", "moe"):
        options["qk_layernorm"] = True
    if choose.random() < 0.3 and "moe" not in kind:
        options["add_bias_linear"] = True
    if layout.tp == 4:
        options["num_query_groups"] = 4
    if kind == "mamba":
        options |= MAMBA | {"mamba_num_groups": choose.choice([layout.tp, 2 * layout.tp])}
    return options | (MLA if "mla" in kind else DELTA if kind == "delta" else {})


def _experts(choose, layout, per_token, packed, alone, masked):
    options = {**EXPERTS, "moe_token_dispatcher_type": choose.choice(["alltoall", "allgather"])}
    if choose.random() < 0.4:
        options["moe_shared_expert_intermediate_size"] = 32
    if choose.random() < 0.3:
        options["moe_router_score_function"] = "sigmoid"
    losses = {}
    # The loss of a row is that of its sequences alone if there is one, and padding is in it without a mask.
    if choose.random() < 0.4 and alone and masked:
        losses["aux_loss"] = 0.1
    if choose.random() < 0.6 and (packed or masked):
        losses["seq_aux_loss"] = 0.05
    if losses and (len(losses) == 1 or VERSION < (0, 14)):
        options["moe_router_load_balancing_type"], options["moe_aux_loss_coeff"] = next(iter(losses.items()))
    elif losses:
        options["moe_router_load_balancing_type"] = list(losses)
        options["moe_aux_loss_coeff"] = list(losses.values())
    # The mean over tokens is that of sequences only if each counts with its tokens. Over ranks a mask is taken right
    # only beside another loss (docs/left.md).
    if choose.random() < 0.4 and (per_token or alone) and masked and (losses or layout.tp * layout.cp == 1):
        options["moe_z_loss_coeff"] = 0.01
    return options


def _rarer(choose, kind, layout, options):
    """Options that few models have, drawn on their own so that a seed keeps the others."""

    def has(name, share=0.25):
        return choose.random() < share and name in KNOWN

    more = {}
    if kind in ("dense", "moe"):
        more |= _rotations(choose, layout, options)
        if choose.random() < 0.25:
            more["kv_channels"] = 16
        if choose.random() < 0.25:
            more["add_qkv_bias"] = True
        if has("attention_output_gate"):
            more["attention_output_gate"] = True
    if kind.startswith("mla"):
        if choose.random() < 0.3:
            more["q_lora_rank"] = None
        if choose.random() < 0.3:
            more |= {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    if "moe" in kind:
        more |= _routing(choose, has, options)
    if not options.get("gated_linear_unit") and choose.random() < 0.25:
        more["activation_func"] = squared_relu
    elif options.get("gated_linear_unit") and has("glu_linear_offset"):
        more |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5}
    if options.get("mtp_num_layers"):
        more["mtp_loss_scaling_factor"] = 0.3
        if kind in ("dense", "moe") and has("mtp_use_repeated_layer", 0.5):
            more["mtp_use_repeated_layer"] = True
    if has("use_mup", 0.15) and kind in ("dense", "moe"):
        more |= {"use_mup": True, "mup_base_hidden_size": 16}
    return more


def squared_relu(x):
    """Of releases without one, too."""
    return torch.relu(x).square()


def _rotations(choose, layout, options):
    way = choose.choice(["", "", "", "half", "pairs", "learned", "none"])
    if way == "half":
        return {"model_kwargs": {"rotary_percent": 0.5}}
    if way == "pairs":
        return {"rotary_interleaved": True}
    # Stages each keep their own part of a learned position's gradient under MTP (docs/left.md).
    if way == "none" or (way == "learned" and not (layout.pp > 1 and options.get("mtp_num_layers"))):
        return {"position_embedding_type": {"none": "none", "learned": "learned_absolute"}[way]}
    return {}


def _routing(choose, has, options):
    more = {}
    sigmoid = options.get("moe_router_score_function") == "sigmoid"
    if choose.random() < 0.3:
        more["moe_router_topk_scaling_factor"] = 2.5
    if choose.random() < 0.3:
        more |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    if sigmoid and choose.random() < 0.5:
        more["moe_router_enable_expert_bias"] = True
    elif not sigmoid and choose.random() < 0.3:
        more["moe_router_pre_softmax"] = True
    if "moe_shared_expert_intermediate_size" in options and has("moe_shared_expert_gate", 0.5):
        more["moe_shared_expert_gate"] = True
    return more


def _recompute(choose, kind):
    way = choose.choice(["", "", "uniform", "block", "selective"])
    if not way:
        return {}
    if way != "selective":
        return {"recompute_granularity": "full", "recompute_method": way, "recompute_num_layers": 1}
    modules = ["moe"] if "moe" in kind else ["mlp"]
    modules += ["layernorm"] if VERSION >= (0, 13) else []
    modules += ["core_attn"] if kind != "delta" else []
    modules += ["mla_up_proj"] if "mla" in kind else []
    return {"recompute_granularity": "selective", "recompute_modules": choose.sample(modules, choose.randint(1, 2))}

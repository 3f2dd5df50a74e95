"""Mutants written by hand: they move the defect that a patch fixes, fix it, or do in another way what was there."""

import ast
import copy

from mutants import Mutant

__all__ = ["handwritten"]

# (patch, end of the body's name): [(what it does, text of the body as ast.unparse writes it, text in its place)].
LAYER = "MultiTokenPredictionLayer."
PACKED, RECOMPUTE = "mtp-packed-sequences", "mtp-recompute"
FORGETS, ROW = "forgets the row", "    packed_seq_params = None\n"
MASK_ROLL = "loss_mask, num_tokens = roll_tensor(loss_mask, shifts=-1, dims=-1, cp_group=cp_group, packed_seq_params="
WRAPS = [
    (
        "wraps what it recomputes",
        "    ctx.run_function = run_function",
        "    run_function = __import__('functools').partial(run_function)\n    ctx.run_function = run_function",
    ),
    (
        "runs it twice",
        "        outputs = run_function(*args)",
        "        run_function(*args)\n        outputs = run_function(*args)",
    ),
]
WITHOUT_OUTPUT = [
    (
        "wraps what it recomputes",
        "    self.run_function = run_function",
        "    run_function = __import__('functools').partial(run_function)\n    self.run_function = run_function",
    ),
    (
        "keeps what it recomputes elsewhere, too",
        "    self.run_function = run_function",
        "    self.run_function = self.recomputed = run_function",
    ),
]
WRITTEN: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    (PACKED, "process_mtp_loss"): [
        (FORGETS, "    mtp_labels = labels.clone()", f"{ROW}    mtp_labels = labels.clone()"),
        ("rolls the mask as if no row were packed", MASK_ROLL + "packed_seq_params)", MASK_ROLL + "None)"),
        (
            "divides by the tokens of the row before the roll",
            "        mtp_loss = loss_mask * mtp_loss",
            "        num_tokens = num_tokens if packed_seq_params is None else original_num_tokens\n"
            "        mtp_loss = loss_mask * mtp_loss",
        ),
        (
            "masks what is masked once more",
            "        mtp_loss = loss_mask * mtp_loss",
            "        loss_mask = loss_mask * (loss_mask > 0)\n        mtp_loss = loss_mask * mtp_loss",
        ),
        ("makes the mask in another way", "torch.ones_like(mtp_labels)", "mtp_labels.new_ones(mtp_labels.shape)"),
    ],
    (PACKED, LAYER + "_get_embeddings"): [
        (FORGETS, "    input_ids, _ = roll_tensor", f"{ROW}    input_ids, _ = roll_tensor"),
        (
            "rolls embeddings in the place of tokens",
            "    decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)",
            "    decoder_input = embedding(input_ids=input_ids.roll(1, -1), position_ids=position_ids).roll(-1, 0)",
        ),
    ],
    (PACKED, LAYER + "forward"): [
        (
            FORGETS,
            "    if self.config.recompute_granularity ==",
            f"{ROW}    if self.config.recompute_granularity ==",
        ),
        ("forgets the row before it embeds", "    input_ids, position_ids,", f"{ROW}    input_ids, position_ids,"),
    ],
    (PACKED, "GPTModel._postprocess"): [
        (
            "forgets the row before the loss",
            "    if self.config.mtp_num_layers:",
            f"{ROW}    if self.config.mtp_num_layers:",
        ),
    ],
    (PACKED, "_roll_tensor_packed_seq"): [
        (
            "reads the padded offsets",
            "    cu_seqlens = packed_seq_params.cu_seqlens_q\n",
            "    cu_seqlens = packed_seq_params.cu_seqlens_q_padded\n"
            "    cu_seqlens = packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens\n",
        ),
        (
            "has another way for one sequence",
            "    rolled_tensor = tensor.clone()\n",
            "    rolled_tensor = tensor.clone()\n    if len(cu_seqlens) == 2:\n        return roll_tensor(tensor)\n",
        ),
    ],
    (PACKED, "roll_tensor"): [
        (
            "takes a row of one sequence for no row",
            "    if packed_seq_params is not None:",
            "    if packed_seq_params is not None and packed_seq_params.cu_seqlens_q.numel() > 2:",
        ),
    ],
    (RECOMPUTE, LAYER + "forward"): [
        (
            "recomputes whenever something is",
            "self.config.recompute_granularity == 'full' and self.training",
            "self.config.recompute_granularity is not None and self.training",
        ),
        (
            "asks for gradients before it recomputes",
            "    if self.config.recompute_granularity ==",
            "    decoder_input = decoder_input.detach()\n    if self.config.recompute_granularity ==",
        ),
    ],
    (RECOMPUTE, LAYER + "_proj_and_transformer_layer"): [
        (
            "enters FP4 by itself",
            "    with rng_context:",
            "    if self.config.fp4:\n        fp8_context = get_fp4_context(self.config)\n    with rng_context:",
        ),
    ],
    (RECOMPUTE, "CheckpointFunction.forward"): WRAPS,
    ("fp8-fp4-recompute", "CheckpointFunction.forward"): WRAPS,
    ("config-override", "CheckpointFunction.forward"): WRAPS,
    ("fp8-fp4-recompute", "CheckpointWithoutOutput.checkpoint"): WITHOUT_OUTPUT,
    ("config-override", "CheckpointWithoutOutput.checkpoint"): WITHOUT_OUTPUT,
    ("frozen-recompute", "checkpointed_forward"): [
        (
            "makes the states require a gradient",
            "    layer = self.layers[index]",
            "    hidden_states = hidden_states\n    layer = self.layers[index]",
        ),
    ],
    ("frozen-recompute", "TransformerBlock.forward"): [
        (
            "makes the states require a gradient itself",
            "    if not self.pre_process:",
            "    if not hidden_states.requires_grad:\n        hidden_states = hidden_states.detach().requires_grad_()\n"
            "    if not self.pre_process:",
        ),
        (
            "makes a copy that requires no gradient",
            "    if not self.pre_process:",
            "    if all((not p.requires_grad for n, p in self.named_parameters() if 'lora' not in n)):\n"
            "        hidden_states = hidden_states.data\n    if not self.pre_process:",
        ),
    ],
    ("rope-fusion", "apply_rotary_pos_emb"): [
        (
            "refuses the factor of YaRN by itself",
            "    if config.apply_rope_fusion:",
            "    if config.apply_rope_fusion and cu_seqlens is not None and mscale != 1.0:\n"
            "        raise ValueError('mscale')\n"
            "    if config.apply_rope_fusion:",
        ),
        (
            "takes the config from elsewhere",
            "    if config.apply_rope_fusion:",
            "    config = getattr(config, 'of_rope', config)\n    if config.apply_rope_fusion:",
        ),
    ],
    ("rope-thd", "_apply_rotary_pos_emb_thd"): [
        (
            "turns the table around where there are ranks",
            "    cp_size = cp_group.size()",
            "    freqs = freqs if cp_group.size() == 1 else freqs.flip(0)\n    cp_size = cp_group.size()",
        ),
        (
            "refuses a table that is too short in words",
            "    cp_size = cp_group.size()",
            "    assert freqs.dim() == 4\n    cp_size = cp_group.size()",
        ),
    ],
    ("mla-rope-table", "YarnRotaryEmbedding.get_cached_cos_sin"): [
        (
            "computes whenever the length differs",
            "seq_len > self.max_seq_len_cached",
            "seq_len != self.max_seq_len_cached",
        ),
        (
            "cuts the table after it is taken",
            "    if seq_len > self.max_seq_len_cached",
            "    seq_len = max(seq_len, self.max_seq_len_cached)\n    if seq_len > self.max_seq_len_cached",
        ),
    ],
    ("expert-bias-padding", "TopKRouter._apply_expert_bias"): [
        ("gives the mask a column", "routing_map & ~padding_mask", "routing_map & ~padding_mask.unsqueeze(-1)"),
        ("gives the mask a column by view", "routing_map & ~padding_mask", "routing_map & ~padding_mask.view(-1, 1)"),
        (
            "leaves padding out of the bias in another place",
            "            self.local_tokens_per_expert",
            "            routing_map = routing_map if padding_mask is None else routing_map\n"
            "            self.local_tokens_per_expert",
        ),
    ],
}


def handwritten(id: str, body: str, function: ast.FunctionDef) -> list[Mutant]:
    """Those of a body whose text is there; releases that never had it have no such mutant."""
    text, found = ast.unparse(copy.deepcopy(function)), []
    for (patch, end), changes in WRITTEN.items():
        if patch == id and body.endswith(f":{end}"):
            for what, old, new in changes:
                changed = _changed(text, old, new)
                if changed != text:
                    found.append(Mutant("by hand", what, ast.parse(changed).body[0]))
    return found


def _changed(text: str, old: str, new: str) -> str:
    """`old` begins with spaces where it is a line: then the first line that begins with it is indented as it was."""
    if not old.startswith(" "):
        return text.replace(old, new)
    old, new = (part.removesuffix("\n") for part in (old, new))
    written, lines = len(old) - len(old.lstrip()), text.splitlines()
    for place, line in enumerate(lines):
        if line.lstrip().startswith(old.lstrip()):
            there = len(line) - len(line.lstrip())
            made = [" " * max(there - written, 0) + part[max(written - there, 0) :] for part in new.splitlines()]
            made[-1] += line[there:].removeprefix(old.lstrip())
            lines[place : place + 1] = made
            break
    return "\n".join(lines)

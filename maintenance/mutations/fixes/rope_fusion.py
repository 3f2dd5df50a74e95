"""How a release could keep fused rotations from what their kernels cannot do."""

RELEASE = "0.19.2"
ROPE = "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb"
IF = "    if config.apply_rope_fusion:"
MULTI = "freqs.dim() > 0 and cu_seqlens is not None and (freqs.size(0) == int(cu_seqlens[-1]))"
CANNOT = f"mscale != 1.0 or mla_rotary_interleaved or ({MULTI})"

FIXES = {
    "asks in the condition": {ROPE: [(IF, f"    if config.apply_rope_fusion and (not ({CANNOT})):")]},
    "asks before, in a name": {
        ROPE: [(IF, f"    fusible = not ({CANNOT})\n    if config.apply_rope_fusion and fusible:")]
    },
    "calls the unfused function in the branch of packed rows": {
        ROPE: [
            (
                "            assert fused_apply_rotary_pos_emb_thd is not None",
                f"            if {CANNOT}:\n"
                "                return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, rotary_interleaved=config.rotary_interleaved, "
                "mla_rotary_interleaved=mla_rotary_interleaved, mscale=mscale, cp_group=cp_group)\n"
                "            assert fused_apply_rotary_pos_emb_thd is not None",
            )
        ]
    },
    "scales and orders itself": {
        ROPE: [
            (
                IF,
                "    if cu_seqlens is not None and mscale != 1.0 and config.apply_rope_fusion and (not mla_rotary_interleaved):\n"
                "        return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, rotary_interleaved=config.rotary_interleaved, mscale=mscale, cp_group=cp_group)\n"
                + IF,
            )
        ]
    },
}
PROOFS = {"scales and orders itself": ["fused-rotations-with-mscale"]}

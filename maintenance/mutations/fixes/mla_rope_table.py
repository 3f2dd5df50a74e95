"""How a release could take the rotary table of a row's own length."""

RELEASE = "0.19.2"
YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding"
GET, SET = f"{YARN}.get_cached_cos_sin", f"{YARN}._set_cos_sin_cache"
RETURN = "    return (self.cos_cached[:seq_len, ...], self.sin_cached[:seq_len, ...])"
LONGER = "seq_len > self.max_seq_len_cached"
CUT = "    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank\n"
CUTS = "not packed_seq and self.cp_group is not None and (self.cp_group.size() > 1)"
WHOLE = ("self.forward(seq_len, offset, packed_seq)", "self.forward(seq_len, offset, True)")

FIXES = {
    "computes for each other length": {GET: [(LONGER, "seq_len != self.max_seq_len_cached")]},
    "computes for shorter ones too, where it cuts": {
        GET: [(LONGER, f"{LONGER} or (seq_len < self.max_seq_len_cached and {CUTS})")]
    },
    "keeps the whole table, and cuts at the call": {
        SET: [WHOLE],
        GET: [
            (
                RETURN,
                f"    cos, sin = (self.cos_cached[:seq_len, ...], self.sin_cached[:seq_len, ...])\n    if {CUTS}:\n    "
                + CUT
                + "        cos, sin = (get_pos_emb_on_this_cp_rank(cos, 0, self.cp_group), get_pos_emb_on_this_cp_rank(sin, 0, self.cp_group))\n"
                "    return (cos, sin)",
            )
        ],
    },
    "forgets the length": {
        GET: [("    if seq_len >", f"    if {CUTS}:\n        self.max_seq_len_cached = 0\n    if seq_len >")]
    },
    "keeps a length of zero where it cuts": {
        SET: [("    self.max_seq_len_cached = seq_len", f"    self.max_seq_len_cached = 0 if {CUTS} else seq_len")]
    },
}

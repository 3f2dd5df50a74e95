"""How a release could rotate packed rows without work for each sequence."""

RELEASE = "0.19.2"
THD = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
SPLIT = "    sequence_splits = torch.split(t, seqlens)"
LOCAL = (
    "    starts, ends = (cu_seqlens[:-1] // cp_size, cu_seqlens[1:] // cp_size)\n"
    "    places = torch.arange(t.size(0), device=t.device)\n"
)
ROTATE = (
    "    return _apply_rotary_pos_emb_bshd(t.unsqueeze(1), {}, rotary_interleaved=rotary_interleaved, "
    "mla_rotary_interleaved=mla_rotary_interleaved, mscale=mscale).squeeze(1)\n"
)
# A rank has the place from the front in the first half of its part of a sequence, and from the back in the second.
GLOBAL = (
    "    own, half = (places - starts[number], (ends - starts)[number] // 2)\n"
    "    whole = (cu_seqlens[1:] - cu_seqlens[:-1])[number]\n"
    "    index = own if cp_size == 1 else torch.where(own < half, cp_rank * half + own, whole - (cp_rank + 1) * half + own - half)\n"
    "    if freqs.size(0) == cu_seqlens[-1]:\n"
    "        index = index + cu_seqlens[:-1][number]\n"
)


def before(lines):
    return {THD: [("    seqlens = ", lines + "    seqlens = ")]}


FIXES = {
    "looks the sequences up": before(
        LOCAL + "    number = torch.bucketize(places, ends, right=True)\n" + GLOBAL + ROTATE.format("freqs[index]")
    ),
    "repeats the numbers of sequences": before(
        LOCAL
        + "    number = torch.repeat_interleave(torch.arange(len(starts), device=t.device), ends - starts, output_size=t.size(0))\n"
        + GLOBAL
        + ROTATE.format("freqs.index_select(0, index.long())")
    ),
    "compares all places with all ends": before(
        LOCAL + "    number = (places[:, None] >= ends[None]).sum(-1)\n" + GLOBAL + ROTATE.format("freqs[index]")
    ),
}

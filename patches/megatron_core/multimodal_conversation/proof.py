"""Proof of multimodal-conversation."""

from __future__ import annotations

from typing import Any

from shim.patches.megatron_core._proof_tokenizers import tokenizer
from shim.testing.proof import Here, proof

CONVERSATION = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
BEGIN, EPOCHS = "<img>", 3


def text_of(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def tags_too_many() -> int:
    """Of one image, in the last of some epochs over the same conversation."""
    chosen, conversation = tokenizer(), [dict(turn) for turn in CONVERSATION]
    for _ in range(EPOCHS):
        tokens, _ = chosen.tokenize_conversation(conversation, return_target=True, add_generation_prompt=False)
    return text_of(tokens).count(BEGIN) - 1


@proof("{:.0f} pairs of tags too many in the third epoch", right="one pair of tags in each epoch")
def an_image_has_one_pair_of_tags(here: Here) -> int:
    """A conversation with an image gets one more pair of image tags each time it is tokenized.

    To reproduce: give the same conversation to `MegatronMultimodalTokenizer(path, "qwen2p5", [], "internvl")
    .tokenize_conversation` three times, with "<image>" in the message of the user. Decode the tokens.

    The third time they are "<img><img><img><image></img></img></img>": `_apply_image_tag` writes the tags into the
    messages of the caller. Right is "<img><image></img>" each time.

    From 0.17 on.
    """
    more: int = here.run(tags_too_many)[0]
    return more

"""Proof of multimodal-conversation."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest import mock

from shim.patches.megatron_core.sft_identity_prompts.proof import Letters
from shim.testing.proof import CannotRunError, Here, proof

CONVERSATION = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
BEGIN, EPOCHS = "<img>", 3


class Words(Letters):
    """A tokenizer of transformers, as far as MegatronMultimodalTokenizer asks."""

    def add_tokens(self, tokens: Sequence[str], special_tokens: bool) -> int:
        return len(tokens)


def tokenizer(prompt_format: str = "qwen2p5", tag: str = "internvl", **options: Any) -> Any:
    """megatron-core's MegatronMultimodalTokenizer around `Words`."""
    try:
        library = import_module("megatron.core.tokenizers.vision.libraries.multimodal_tokenizer")
    except ModuleNotFoundError as error:
        raise CannotRunError("this release has no MegatronMultimodalTokenizer") from error
    transformers = mock.Mock()
    transformers.AutoTokenizer.from_pretrained.return_value = Words()
    with (
        mock.patch.object(library, "HAVE_TRANSFORMERS", True),
        mock.patch.object(library, "transformers", transformers, create=True),
    ):
        return library.MegatronMultimodalTokenizer("letters", prompt_format, [], tag, **options)


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

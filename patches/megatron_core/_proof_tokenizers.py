"""Tokenizers with a token for each letter, for proofs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest import mock

from shim.testing.proof import CannotRunError


class Letters:
    """A tokenizer of transformers, as far as SFTTokenizer asks: each letter is a token."""

    bos_token_id, eos_token_id, pad_token_id, chat_template = None, 0, 1, "{{ messages[0]['content'] }}"

    def __len__(self) -> int:
        return 256

    def convert_tokens_to_ids(self, token: str) -> int:
        return 2

    def apply_chat_template(self, conversation: Any, chat_template: str, return_tensors: str = "", **_: Any) -> Any:
        import numpy
        from jinja2 import Template

        ids = list(map(ord, Template(chat_template).render(messages=conversation)))
        return numpy.array([ids]) if return_tensors else ids


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

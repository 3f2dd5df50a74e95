"""Tokenizers with a token for each letter, for proofs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def library_with(tokens: Letters, module: str, name: str) -> Iterator[Any]:
    """A module of megatron-core that has the tokenizer `name`, and finds `tokens` in transformers meanwhile."""
    try:
        library = import_module(f"megatron.core.tokenizers.{module}")
    except ModuleNotFoundError as error:
        raise CannotRunError(f"this release has no {name}") from error
    transformers = mock.Mock()
    transformers.AutoTokenizer.from_pretrained.return_value = tokens
    with (
        mock.patch.object(library, "HAVE_TRANSFORMERS", True),
        mock.patch.object(library, "transformers", transformers, create=True),
    ):
        yield library


def tokenizer(prompt_format: str = "qwen2p5", tag: str = "internvl", **options: Any) -> Any:
    """megatron-core's MegatronMultimodalTokenizer around `Words`."""
    with library_with(Words(), "vision.libraries.multimodal_tokenizer", "MegatronMultimodalTokenizer") as library:
        return library.MegatronMultimodalTokenizer("letters", prompt_format, [], tag, **options)

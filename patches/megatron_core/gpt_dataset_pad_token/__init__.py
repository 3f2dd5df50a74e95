"""The id that stands for padding in GPTDataset.

What is wrong: GPTDataset takes the pad id of the tokenizer as it is, writes it behind a row that is too short, and
takes each token of this id for padding: it becomes token 0, and is not trained.

1. The id may be that of the end of a document (0.12 to 0.15), as in many tokenizers without a padding token of their
   own. Then each end of a document in the corpus is lost, in silence: the model neither sees one nor learns to end.
2. The tokenizer may have no pad id, and say so with None (from 0.12 on). Then a row that needs padding raises a
   TypeError, such as the last row of validation with drop_last_partial_validation_sequence=False. So does each row
   with add_extra_token_to_sequence=False.

What the patch does: it lets -1 stand for padding in these two cases, as upstream does for a tokenizer that raises an
error instead of giving a pad id. No token has it, and it becomes token 0 in a row. All else stays: the files of indices
and their names, and any other pad id. From 0.16 on the first case is left to upstream, with allow_ambiguous_pad_tokens.

Upstream: 0.16 fixed the first case (Megatron-LM pull request 2017); the second is open.

Not covered: a corpus that was written with padding of the id of the end of a document. It is trained then, as from 0.16
on. A dataset that was built before the patch came.

Delete when: every supported release lets -1 stand for padding in both cases.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shim.patches._arguments import Function

INIT = "megatron.core.datasets.gpt_dataset:GPTDataset.__init__"
NO_TOKEN = -1


def _init(original: Function, ends: bool) -> Function:
    """ends: whether the pad id may be that of the end of a document."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._pad_token_id is None or (ends and self._pad_token_id in _ends(self.config.tokenizer)):
            self._pad_token_id = NO_TOKEN

    return __init__


def _ends(tokenizer: Any) -> Iterator[Any]:
    """The ids of the end of a document. A tokenizer that has none raises an error, or has no such attribute."""
    for name in ("eod", "eos"):
        with contextlib.suppress(AttributeError, NotImplementedError):
            yield getattr(tokenizer, name)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: functools.partial(_init, ends=variant == "v0_12")}

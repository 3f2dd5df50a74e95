"""The targets of SFTTokenizer's prompt format "identity".

What is wrong (0.18 to 0.19): with return_target, SFTTokenizer.tokenize_conversation is to hide what the assistant has
not said. For the format "identity" it hides nothing, so that --sft trains on prompts: what system, user and tools say.
0.17 hides them. The format takes messages that have their template already, as a data set for Nemotron has.

What the patch does: it lets the function treat "identity" as the other formats that know their turns. The tokens stay.
A conversation whose turns cannot be told apart raises upstream's errors, as on 0.17: an empty turn of the assistant, a
role that is none, turns whose tokens are not those of the whole. The format "default" is trained whole, as upstream
says there.

Upstream: fixed on the main branch (Megatron-LM pull request 6682).

Delete when: every supported release hides the prompts of this format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches._views import view_with

TOKENIZE = "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation"
WHOLE, BY_TURN = "identity", "identity, turn by turn"


def _tokenize(original: Function) -> Function:
    @functools.wraps(original)
    def tokenize_conversation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._prompt_format == WHOLE:
            self = view_with(self, _prompt_format=BY_TURN)
        return original(self, *args, **kwargs)

    return tokenize_conversation


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TOKENIZE: _tokenize}

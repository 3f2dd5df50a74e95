"""The conversation that the tokenizer of multimodal models writes to.

What is wrong (from 0.17 on): MegatronMultimodalTokenizer.tokenize_conversation writes its changes into the conversation
that it is given. With an image tag it puts the pair of tags around each image of the caller's messages. A conversation
that stays in memory, as in a data set or in the history of a chat, gets one more pair in each epoch or turn, in
silence. With force_system_message the system message of the caller's list is replaced, and the prompt format
"nemotron5-aligned" writes other roles.

The patch gives the function a copy of the list and of its messages. The tokens of a conversation are those of its first
call.

Upstream: open.

Delete when: no supported release writes to the conversation of the caller.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

TOKENIZE = (
    "megatron.core.tokenizers.vision.libraries.multimodal_tokenizer:MegatronMultimodalTokenizer.tokenize_conversation"
)


def _tokenize(original: Function) -> Function:
    given, put = argument(original, "conversation"), replacing(original, "conversation")

    @functools.wraps(original)
    def tokenize_conversation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = put(args, kwargs, [copy.copy(turn) for turn in given(args, kwargs)])
        return original(*args, **kwargs)

    return tokenize_conversation


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TOKENIZE: _tokenize}

"""What tools say in the targets of the tokenizer of multimodal models.

What is wrong (from 0.17 on): with return_target, MegatronMultimodalTokenizer.tokenize_conversation is to hide what the
assistant has not said. It hides the roles "system" and "user" alone, so that what a tool has answered is trained, in
silence. SFTTokenizer hides "tool" as well.

What the patch does: it hides turns of "tool" as those of "user". The template of llama3p1 writes "ipython" for "tool"
and takes both, so this role is hidden, too. Tokens stay. A turn that the template leaves out, as "mistral" does with
tools, has none to hide. Targets of any other role are those of stock.

The function asks the tokenizer of transformers for the whole conversation, and then for each turn, before it reads the
role of the turn. The patch gives it copies of the turns of tools, and a tokenizer that calls such a copy "user" once
its tokens are made.

Upstream: open.

Delete when: no supported release trains on what tools say.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches._views import view_with

TOKENIZE = (
    "megatron.core.tokenizers.vision.libraries.multimodal_tokenizer:MegatronMultimodalTokenizer.tokenize_conversation"
)
TOOLS = ("tool", "ipython")


def _of_a_tool(turn: Mapping[str, Any]) -> bool:
    return turn["role"].lower() in TOOLS


def _asked(tokenizer: Any) -> Any:
    """The tokenizer of transformers for one call, which asks for the conversation first and then turn by turn."""
    by_turn = False

    def apply_chat_template(conversation: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal by_turn
        tokens = tokenizer.apply_chat_template(conversation, *args, **kwargs)
        if by_turn:
            for turn in filter(_of_a_tool, conversation):
                turn["role"] = "user"
        by_turn = True
        return tokens

    return view_with(tokenizer, apply_chat_template=apply_chat_template)


def _tokenize(original: Function) -> Function:
    given, put = argument(original, "conversation"), replacing(original, "conversation")
    with_targets = argument(original, "return_target")

    @functools.wraps(original)
    def tokenize_conversation(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = (self, *args)
        conversation = given(call, kwargs)
        if with_targets(call, kwargs) and any(map(_of_a_tool, conversation)):
            turns = [copy.copy(turn) if _of_a_tool(turn) else turn for turn in conversation]
            call, kwargs = put(call, kwargs, turns)
            self = view_with(self, tokenizer=_asked(self.tokenizer))
        return original(self, *call[1:], **kwargs)

    return tokenize_conversation


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {TOKENIZE: _tokenize}

"""Proof of multimodal-tool-turns."""

from __future__ import annotations

from collections.abc import Sequence

from shim.patches.megatron_core._proof_tokenizers import tokenizer
from shim.testing.proof import Here, proof

CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "<call>"},
    {"role": "tool", "content": "Rain."},
    {"role": "assistant", "content": "It rains."},
]
HIDDEN, PREFIX = -100, 3  # of a turn of the assistant, the first PREFIX tokens are hidden


def right_targets(conversation: Sequence[dict[str, str]]) -> list[int]:
    """What the assistant says in the prompt format "qwen2p5", and nothing else. Each letter is a token."""
    targets = []
    for turn in conversation:
        tokens = list(map(ord, f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n"))
        hidden = PREFIX if turn["role"] == "assistant" else len(tokens)
        targets += [HIDDEN] * hidden + tokens[hidden:]
    return targets


def wrong_targets() -> int:
    _, targets = tokenizer().tokenize_conversation(
        [dict(turn) for turn in CONVERSATION], return_target=True, add_generation_prompt=False
    )
    return sum(found != right for found, right in zip(targets.tolist(), right_targets(CONVERSATION), strict=True))


@proof("{:.0f} of 150 tokens are targets by mistake", right="only the assistant is trained")
def what_tools_say_is_no_target(here: Here) -> int:
    """The tokenizer of multimodal models makes what tools say a target.

    To reproduce: `MegatronMultimodalTokenizer(path, "qwen2p5", [], "").tokenize_conversation(conversation,
    return_target=True, add_generation_prompt=False)` of a conversation with a turn of the role "tool". Compare the
    second result with -100.

    The targets of that turn are its tokens: the function hides the roles "system" and "user", and knows no "tool".
    Right are targets of the assistant's turns alone, as SFTTokenizer.tokenize_conversation gives.

    From 0.17 on.
    """
    wrong: int = here.run(wrong_targets)[0]
    return wrong

"""Proof of sft-identity-prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shim.patches.megatron_core._proof_tokenizers import Letters, library_with
from shim.testing.proof import Here, proof

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
HIDDEN = -100


def tokenizer(prompt_format: str) -> Any:
    """megatron-core's SFTTokenizer around `Letters`."""
    with library_with(Letters(), "text.libraries.sft_tokenizer", "SFTTokenizer") as library:
        return library.SFTTokenizer("letters", prompt_format)


def right_targets(conversation: Sequence[dict[str, str]]) -> list[int]:
    """What the assistant says, and nothing else."""
    return [
        ord(letter) if turn["role"] == "assistant" else HIDDEN for turn in conversation for letter in turn["content"]
    ]


def wrong_targets() -> int:
    _, targets = tokenizer("identity").tokenize_conversation(
        CONVERSATION, return_target=True, add_generation_prompt=False
    )
    return sum(found != right for found, right in zip(targets.tolist(), right_targets(CONVERSATION), strict=True))


@proof("{:.0f} of 35 tokens are targets by mistake", right="only the assistant is trained")
def prompts_are_no_targets(here: Here) -> int:
    """SFT with the prompt format "identity" trains on prompts.

    To reproduce: `SFTTokenizer(path, "identity").tokenize_conversation(conversation, return_target=True,
    add_generation_prompt=False)` of a conversation with turns of system, user and assistant. Compare the second result
    with -100.

    The targets are the tokens themselves: for "identity" the function returns before it hides what the assistant has
    not said. Right are targets of the assistant's turns alone.

    From 0.18 to 0.19. Fixed on the main branch (Megatron-LM pull request 6682).
    """
    wrong: int = here.run(wrong_targets)[0]
    return wrong

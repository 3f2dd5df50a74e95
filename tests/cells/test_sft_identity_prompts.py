"""sft-identity-prompts: what the assistant has not said is no target, in this process and in data workers."""

import importlib
import sys
import types
from pathlib import Path

import megatron.core
import numpy
import pytest
import torch
from thorough import in_full
from torch.utils.data import DataLoader, Dataset

import shim
from shim.patches.megatron_core.sft_identity_prompts.proof import CONVERSATION, HIDDEN, right_targets, tokenizer

CELLS = {"0.18.2": "all"}

ID = "sft-identity-prompts"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")
TOOLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "<call>"},
    {"role": "tool", "content": "Rain."},
    {"role": "assistant", "content": "It rains."},
]
SHORT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def applied():
    return shim.patched(only=[ID], require=[ID])


def apply_in_worker(_):
    shim.apply(only=[ID], require=[ID])


def targets_of(conversation, prompt_format="identity"):
    return tokenizer(prompt_format).tokenize_conversation(conversation, True, False)[1].tolist()


def tokens_of(conversation):
    return [ord(letter) for turn in conversation for letter in turn["content"]]


@pytest.mark.parametrize("conversation", [CONVERSATION, TOOLS, SHORT, CONVERSATION + TOOLS])
def test_targets_are_what_the_assistant_says(conversation):
    assert targets_of(conversation) == tokens_of(conversation)
    with applied():
        tokens, targets = tokenizer("identity").tokenize_conversation(conversation, True, False)
    assert tokens.tolist() == tokens_of(conversation)
    assert targets.tolist() == right_targets(conversation) and HIDDEN in targets


@pytest.mark.parametrize("prompt_format", ["default", "nemotron-nano-v2", "nemotron-h-aligned"])
def test_other_formats_are_those_of_stock(prompt_format):
    stock = targets_of(CONVERSATION, prompt_format)
    with applied():
        assert targets_of(CONVERSATION, prompt_format) == stock


def test_tokens_alone_are_those_of_stock():
    """With add_generation_prompt, as inference asks."""
    with applied():
        found = tokenizer("identity").tokenize_conversation(
            CONVERSATION, return_target=False, add_generation_prompt=True
        )
    assert found.tolist() == tokens_of(CONVERSATION)


def test_the_tokenizer_keeps_its_format():
    with applied():
        chosen = tokenizer("identity")
        chosen.tokenize_conversation(CONVERSATION, return_target=True, add_generation_prompt=False)
    assert chosen._prompt_format == "identity"
    _, targets = chosen.tokenize_conversation(CONVERSATION, return_target=True, add_generation_prompt=False)
    assert targets.tolist() == tokens_of(CONVERSATION), "stock's function again"


@pytest.mark.parametrize(
    "turn, error, text",
    [
        ({"role": "assistant", "content": ""}, ValueError, "empty assistant turn"),
        ({"role": "critic", "content": "No."}, ValueError, "Wrong role"),
    ],
)
def test_turns_that_cannot_be_told_apart_are_an_error(turn, error, text):
    with applied(), pytest.raises(error, match=text):
        targets_of([*CONVERSATION[:2], turn])


class Targets(Dataset):
    """Targets of two conversations, each by one call of the tokenizer."""

    conversations = (CONVERSATION, TOOLS)

    def __init__(self):
        self.tokenizer = tokenizer("identity")

    def __len__(self):
        return len(self.conversations)

    def __getitem__(self, row):
        return torch.as_tensor(self.tokenizer.tokenize_conversation(self.conversations[row], True, False)[1])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=in_full)])
def test_workers(method):
    init = apply_in_worker if method == "spawn" else None
    with applied():
        loader = DataLoader(Targets(), None, num_workers=2, multiprocessing_context=method, worker_init_fn=init)
        for _ in range(1 if method == "spawn" else 2):
            assert [row.tolist() for row in loader] == [right_targets(CONVERSATION), right_targets(TOOLS)]


@pytest.fixture
def sft_dataset(monkeypatch):
    """megatron-core's SFTDataset. Its package needs a Python newer than some on which megatron-core itself runs."""
    package = types.ModuleType("megatron.training")
    package.__path__ = [str(Path(megatron.core.__file__).parents[1] / "training")]
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    name = "megatron.training.datasets.sft_dataset"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).SFTDataset
    for module in [module for module in sys.modules if module.startswith("megatron.training.")]:
        monkeypatch.delitem(sys.modules, module)


def test_rows_of_sft_dataset(sft_dataset):
    """Through its loss mask, which --sft trains with."""

    def trained():
        dataset = sft_dataset.__new__(sft_dataset)
        chosen = tokenizer("identity")
        asked = types.SimpleNamespace(tokenize_conversation=chosen.tokenize_conversation, eod=0, pad=2)
        dataset.config = types.SimpleNamespace(
            tokenizer=asked,
            sequence_length=len(tokens_of(CONVERSATION)),
            context_parallel_size=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            create_attention_mask=False,
        )
        dataset.dataset, dataset.indices = [CONVERSATION], numpy.arange(1)
        return dataset[0]["loss_mask"].bool().tolist()

    right = [target != HIDDEN for target in right_targets(CONVERSATION)][1:]
    assert trained() == [True] * len(right) + [False], "the last is padding"
    with applied():
        assert trained() == [*right, False]

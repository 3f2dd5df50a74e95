"""multimodal-conversation: a conversation stays as it is, so each epoch gives the same tokens, also in data workers."""

import copy

import pytest
import torch
from thorough import in_full
from torch.utils.data import DataLoader, Dataset

import shim
from shim.patches.megatron_core._proof_tokenizers import tokenizer
from shim.patches.megatron_core.multimodal_conversation.proof import CONVERSATION, text_of

CELLS = {"0.17.1": "all"}

ID = "multimodal-conversation"
pytestmark = pytest.mark.skipif(not shim.plan()[ID].wanted, reason="this release needs no patch")
SYSTEM = [{"role": "system", "content": "Be brief."}, *CONVERSATION]


def applied():
    return shim.patched(only=[ID], require=[ID])


def apply_in_worker(_):
    shim.apply(only=[ID], require=[ID])


def both(chosen, conversation):
    return [part.tolist() for part in chosen.tokenize_conversation(conversation, True, False)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tag": "nvlm"},
        {"tag": ""},
        {"force_system_message": True},
        {"prompt_format": "nemotron5-aligned"},
        {"prompt_format": "llama3p1"},
    ],
    ids=str,
)
def test_each_call_gives_the_tokens_of_stocks_first_call(options):
    stock = tokenizer(**options).tokenize(copy.deepcopy(SYSTEM))
    given = copy.deepcopy(SYSTEM)
    with applied():
        chosen = tokenizer(**options)
        assert [chosen.tokenize(given) for _ in range(3)] == [stock] * 3
    assert given == SYSTEM


def test_targets_are_those_of_stocks_first_call():
    stock = both(tokenizer(), copy.deepcopy(SYSTEM))
    given = copy.deepcopy(SYSTEM)
    with applied():
        chosen = tokenizer()
        assert [both(chosen, given) for _ in range(3)] == [stock] * 3


def test_stock_writes_to_the_conversation():
    given = copy.deepcopy(SYSTEM)
    both(tokenizer(force_system_message=True), given)
    assert [turn["content"] for turn in given] != [turn["content"] for turn in SYSTEM]


def test_the_history_of_a_chat():
    """Inference gives it to `tokenize`, longer each time."""
    history = copy.deepcopy(CONVERSATION)
    with applied():
        chosen = tokenizer()
        for question in ("Sure?", "Really?"):
            history.append({"role": "user", "content": question})
            text = text_of(chosen.tokenize(history))
            assert text.count("<img>") == text.count("</img>") == 1 and question in text


def test_by_name():
    given = copy.deepcopy(CONVERSATION)
    with applied():
        tokens = tokenizer().tokenize_conversation(
            add_generation_prompt=False, return_target=False, conversation=tuple(given)
        )
    assert text_of(tokens).count("<img>") == 1 and given == CONVERSATION


def test_an_error_leaves_the_conversation_as_well():
    given = [*copy.deepcopy(CONVERSATION), {"role": "user", "content": ""}]
    before = copy.deepcopy(given)
    with applied(), pytest.raises(ValueError, match="empty turn"):
        both(tokenizer(), given)
    assert given == before


class InMemory(Dataset):
    """Rows that keep their conversations."""

    def __init__(self):
        self.tokenizer = tokenizer()
        self.conversations = [copy.deepcopy(CONVERSATION) for _ in range(4)]

    def __len__(self):
        return len(self.conversations)

    def __getitem__(self, row):
        return torch.as_tensor(both(self.tokenizer, self.conversations[row])[0])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=in_full)])
def test_epochs_of_workers(method):
    init = apply_in_worker if method == "spawn" else None
    with applied():
        loader = DataLoader(
            InMemory(),
            None,
            num_workers=2,
            multiprocessing_context=method,
            worker_init_fn=init,
            persistent_workers=True,
        )
        epochs = [[text_of(row.tolist()).count("<img>") for row in loader] for _ in range(3)]
    assert epochs == [[1] * 4] * 3

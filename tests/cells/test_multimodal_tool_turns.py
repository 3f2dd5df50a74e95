"""multimodal-tool-turns: what tools say is no target, in each prompt format, and all else is as on stock."""

import copy
from unittest import mock

import numpy
import pytest
from jinja2 import Template
from needed import needed
from thorough import times

import shim
from shim.patches.megatron_core import _proof_tokenizers
from shim.patches.megatron_core.multimodal_conversation.proof import text_of
from shim.patches.megatron_core.multimodal_tool_turns.proof import CONVERSATION, HIDDEN

CELLS = {"0.17.0": "all"}

ID, OTHER = "multimodal-tool-turns", "multimodal-conversation"
pytestmark = needed(ID)
SYSTEM = [{"role": "system", "content": "Be brief."}, *CONVERSATION, CONVERSATION[2], CONVERSATION[3]]
BEGINS = ("llama3", "llama3p1", "llama3p2", "nvlm-yi-34b", "nemotron5", "nemotron5-aligned", "mistral")
FORMATS = ("qwen2p0", "qwen2p5", "chatml", *BEGINS)  # BEGINS have a token in front of the conversation


class Words(_proof_tokenizers.Words):
    """Reads templates as transformers does. It has one for the formats that have none, and a token in front."""

    chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}|{% endfor %}"
    unk_token_id = 3

    def __init__(self, begin):
        self.begin = begin

    def apply_chat_template(self, conversation, chat_template, return_tensors="", **_):
        template = Template(chat_template or self.chat_template, trim_blocks=True, lstrip_blocks=True)
        text = template.render(messages=conversation, bos_token=self.begin, eos_token="$")
        ids = list(map(ord, text))
        return numpy.array([ids]) if return_tensors else ids


def tokenizer(prompt_format, **options):
    begin = "^" if prompt_format in BEGINS else ""
    with mock.patch.object(_proof_tokenizers, "Words", lambda: Words(begin)):
        return _proof_tokenizers.tokenizer(prompt_format, **options)


def spoken(role, conversation=SYSTEM):
    """The conversation with another role for tools."""
    return [{**turn, "role": role if turn["role"] == "tool" else turn["role"]} for turn in conversation]


def applied(*others):
    return shim.patched(only=[ID, *others], require=[ID, *others])


def both(chosen, conversation):
    """Tokens and targets."""
    return [part.tolist() for part in chosen.tokenize_conversation(copy.deepcopy(conversation), True, False)]


def trained(targets):
    return [target for target in targets if target != HIDDEN]


def in_each_format(conversation, **options):
    return {name: both(tokenizer(name, **options), conversation) for name in FORMATS}


@pytest.mark.parametrize("role", times(["Tool"], ["Tool", "tool", "ipython"]))
@pytest.mark.parametrize("tag", times(["nvlm"], ["nvlm", ""]))
def test_what_is_trained_is_what_stock_trains_if_the_user_says_it(role, tag):
    stock, of_user = in_each_format(spoken(role), tag=tag), in_each_format(spoken("user"), tag=tag)
    with applied():
        found = in_each_format(spoken(role), tag=tag)
    for name, (tokens, targets) in found.items():
        assert tokens == stock[name][0], name
        assert trained(targets) == trained(of_user[name][1]), name
        assert all(target in (token, HIDDEN) for token, target in zip(tokens, targets, strict=True)), name
        no_tools = name == "mistral"  # its template leaves them out
        assert (targets == stock[name][1]) == no_tools, name


def test_with_a_system_message_of_the_format():
    both_of = [both(tokenizer("qwen2p5", force_system_message=True), spoken(role)) for role in ("tool", "user")]
    with applied():
        tokens, targets = both(tokenizer("qwen2p5", force_system_message=True), SYSTEM)
    assert tokens == both_of[0][0]
    assert trained(targets) == trained(both_of[1][1]) != trained(both_of[0][1])


@pytest.mark.parametrize("conversation", [spoken("user"), spoken("critic"), SYSTEM[:3], SYSTEM[1:2]], ids=len)
def test_without_tools_the_targets_are_those_of_stock(conversation):
    stock = in_each_format(conversation)
    with applied():
        assert in_each_format(conversation) == stock


def test_a_tool_alone():
    with applied():
        tokens, targets = both(tokenizer("qwen2p5"), CONVERSATION[2:3])
    assert "tool\nRain." in text_of(tokens)
    assert targets == [HIDDEN] * len(tokens)


def test_tokens_alone_are_those_of_stock():
    """As inference asks, with the prefix of the assistant."""
    stock = [tokenizer(name).tokenize(copy.deepcopy(SYSTEM)) for name in FORMATS]
    with applied():
        assert [tokenizer(name).tokenize(copy.deepcopy(SYSTEM)) for name in FORMATS] == stock


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_epochs(others):
    """The tokenizer and the conversation stay as they are, and a call may name its arguments."""
    with applied(*others):
        for name in FORMATS:
            given = copy.deepcopy(SYSTEM)
            chosen = tokenizer(name, tag="internvl" if others else "")
            words, once = chosen.tokenizer, both(chosen, SYSTEM)
            for _ in range(2):
                found = chosen.tokenize_conversation(
                    add_generation_prompt=False, return_target=True, conversation=given
                )
                assert [part.tolist() for part in found] == once, name
            assert chosen.tokenizer is words
            assert [turn["role"].lower() for turn in given] == [turn["role"] for turn in SYSTEM], name
            assert given == SYSTEM or not others, name


def test_an_error_leaves_all_as_it_was():
    given = [*copy.deepcopy(SYSTEM), {"role": "tool", "content": ""}]
    before = copy.deepcopy(given)
    with applied():
        chosen = tokenizer("qwen2p5", tag="")
        words = chosen.tokenizer
        with pytest.raises(ValueError, match="empty turn"):
            chosen.tokenize_conversation(given, True, False)
    assert given == before and chosen.tokenizer is words


def test_a_subclass_may_ask_its_tokenizer_for_more():
    """Without targets it is the tokenizer itself."""
    asked, itself = [], []
    with applied():
        chosen = tokenizer("qwen2p5")

        class Asking(type(chosen)):
            def _apply_image_tag(self, text):
                asked.append(self.tokenizer.convert_tokens_to_ids("a"))
                itself.append(self is chosen)
                return super()._apply_image_tag(text)

        chosen.__class__ = Asking
        both(chosen, SYSTEM)
        chosen.tokenize(copy.deepcopy(SYSTEM))
    assert asked == [2, 2] and itself == [False, True]

"""Phrases: text with gaps that is found in a syntax tree, or is not."""

import ast

import pytest

from shim._releases.phrases import in_order, nodes_of, parsed, returns_only, stands_in

BODY = """
def forward(self, x, *args, scale=1.0, **kwargs):
    first = self.norm(x, eps=1e-5, training=self.training)
    if self.training and scale > 0:
        out = run(first, *args, mask=None, **kwargs)
    else:
        out = skip(first)
    with guard(), region() as r:
        out[0] = out.sum()
    def inner(y):
        return y
    if r:
        return out, None
    return out
"""
FUNCTION = ast.parse(BODY).body[0]
NODES = nodes_of(FUNCTION)


@pytest.mark.parametrize(
    "phrase",
    [
        "self.norm(x, eps=1e-5, training=self.training)",
        "self.norm(x, training=self.training, eps=1e-5)",  # the order of keywords is free
        "self.norm(x, ...)",
        "self.norm(..., eps=_)",
        "_.norm(...)",
        "self._(x, ...)",
        "run(_, *args, mask=None, **kwargs)",
        "run(first, ...)",
        "if self.training and scale > 0: ...",
        "first = _",
        "out = skip(_)",
        "with ...: ...",
        "with guard(), ...: ...",
        "with ..., region() as _: ...",
        "out[0] = _",
        "return (out, None)",
        "return (out, ...)",
        "def inner(y): ...",
        "_.sum()",
    ],
)
def test_a_phrase_stands_in_a_body(phrase):
    assert stands_in(phrase, NODES)


@pytest.mark.parametrize(
    "phrase",
    [
        "self.norm(x)",  # keywords are missing
        "self.norm(x, eps=1e-5)",
        "self.norm(x, ..., affine=_)",
        "self.norm(y, ...)",
        "run(first, ..., mask=0)",
        "run(first, ..., mask=False)",
        "run(_, _, ...)",  # *args is one element of the list
        "if scale > 0: ...",
        "if self.training: ...",
        "while self.training and scale > 0: ...",
        "with guard(): ...",
        "with region() as _, ...: ...",
        "out[1] = _",
        "return (None, out)",
        "scale > 0.0",  # another constant, although equal
        "scale < 0",
    ],
)
def test_a_phrase_does_not_stand_in_a_body(phrase):
    assert not stands_in(phrase, NODES)


def test_phrases_stand_in_their_order():
    assert in_order(["self.norm(...)", "run(...)", "skip(...)"], NODES) is None
    assert in_order(["run(...)", "self.norm(...)"], NODES) == "self.norm(...)"
    assert in_order(["skip(...)", "skip(...)"], NODES) == "skip(...)"  # each needs a place of its own


def test_what_a_function_returns_is_not_what_functions_inside_it_return():
    assert returns_only(["(out, None)", "out"], FUNCTION) is None
    assert returns_only(["out"], FUNCTION) == "(out, None)"
    assert returns_only(["(_, _)", "y"], FUNCTION) == "out"
    assert returns_only(["_"], ast.parse("def f(): pass").body[0]) == "nothing"
    assert returns_only(["None"], ast.parse("def f(): return").body[0]) is None


@pytest.mark.parametrize("text", ["", "a = 1; b = 2", "if x", "a b"])
def test_a_phrase_is_one_expression_or_one_statement(text):
    with pytest.raises(ValueError, match=r"one expression or one statement|not Python"):
        parsed(text)

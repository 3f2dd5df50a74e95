"""Phrases: text with gaps that is found in a syntax tree, or is not."""

import ast

import pytest

from shim._releases.phrases import binds, in_order, nodes_of, parsed, returns_only, stands_in, strays

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


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "x, y = y, x",
        "x += 1",
        "del x",
        "for x in y: pass",
        "with y as x: pass",
        "print(x := 1)",
        "import x",
        "import y as x",
        "def x(): pass",
        "y = lambda x: x",
        "try: pass\n    except E as x: pass",
        "match y:\n        case {'a': x}: pass",
        "[y, *x] = z",
    ],
)
def test_a_name_is_bound_by_every_form_of_binding(text):
    function = ast.parse(f"def f(x, y):\n    {text}\n    return x").body[0]
    assert binds("x", [], function)


def test_what_a_body_only_reads_or_changes_in_place_is_not_bound():
    function = ast.parse("def f(x, *y, z=0):\n    x.y = z\n    x[0] = y\n    return g(x, y=z)").body[0]
    assert not any(binds(name, [], function) for name in "xyz")


def test_a_binding_in_a_phrase_is_allowed():
    function = ast.parse("def f(self):\n    self.n = 1\n    x = self.n\n    x += 2").body[0]
    assert not binds("self.n", ["self.n = _"], function) and binds("self.n", ["x = self.n"], function)
    assert not binds("x", ["x = _", "x += 2"], function) and binds("x", ["x = _"], function)


CONFINED = ast.parse(
    "def f(self, mask):\n"
    "    assert mask.dim() == 1\n"
    "    if mask is not None:\n"
    "        out = out & ~mask\n"
    "    self.count += out.sum()\n"
).body[0]


def test_an_expression_is_confined_to_phrases():
    assert not strays("mask", ["if mask is not None: ...", "out = out & ~mask"], CONFINED)
    assert not strays("mask", ["if mask is not None: out = out & ~mask"], CONFINED)
    assert not strays("self.count", ["self.count += _"], CONFINED)
    assert not strays("self.other", ["self.count += _"], CONFINED)


def test_a_phrase_with_any_body_allows_only_what_stands_in_its_head():
    assert strays("mask", ["if mask is not None: ..."], CONFINED)
    assert strays("mask", ["out = out & ~mask"], CONFINED)
    assert strays("out", ["self.count += _"], CONFINED)

"""Fingerprints: the same on every Python, blind to what does not run, and sensitive to everything that does."""

import ast
from textwrap import dedent

import pytest
from unit_helpers import output_of, write_file

from shim._errors import SourceError
from shim._releases.fingerprint import definitions, fingerprint, fingerprint_of, signature_part, split_target
from shim._releases.sources import Sources


def of(text, name="f"):
    tree = ast.parse(dedent(text))
    found = definitions(tree, name)
    assert found, f"no {name}"
    return fingerprint_of(found, name)


GOLDEN_SOURCE = '''
import os.path as osp, sys
from ..core import thing as renamed, other

LIMIT: int = 1_000_000
NAMES = ("a", b"b", 1.5, 2j, None, ..., True, 10**30, "\\u00e4", u"x")

@decorate(name="x")
def f(a, /, b: "int" = -1, *args, c=f"{LIMIT!r:>{10}} {osp=} {{}}" "tail", d: dict[str, int] = {**{}, 1: 2},
      **kw) -> int:
    """Docstring."""
    with open(a) as one, open(b) as two:
        x = [i for i in one if (n := i)] + two[1:, ..., ::2]
    match x:
        case [1, *rest] if rest:
            return lambda *, q=3: q
        case {"k": str() as v, **more} | None:
            pass
    try:
        raise ValueError from None
    except (KeyError, ValueError) as error:
        del error
    finally:
        global G
        G = not x
    return x @ b if a else f'{a:{b}.{c}f}' 'joined' f"{d}"

async def g():
    async for x in y:
        yield await x
    return

class C(Base, metaclass=M):
    """Docstring."""
    attribute: int

    class Inner:
        def method(self):
            return super().method()

if sys.version_info > (3,):
    def h(): return 1
elif LIMIT:
    def h(): return 2
else:
    h = None
'''
GOLDEN = {
    "f": "40191bcc08ce47f8.5a48da7a",
    "g": "57ae6501898ac991.3487c978",
    "C": "8779e80a837265f2.-",
    "C.Inner.method": "4a1b2d8d3040b6f0.70c127dc",
    "C.attribute": "412f7fcf9b019acb.-",
    "h": "fdf2ae784db062ed.cfdecc64",
    "LIMIT": "8b6d5b45119c6324.-",
    "NAMES": "59787f254e02f7f7.-",
    "osp": "92d323286db0dc64.-",
    "sys": "8b64ceb063e5579a.-",
    "renamed": "5d699247400ea1f3.-",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    """The pins of releases are compared on Python 3.10 to 3.13, so these values never change."""
    assert of(GOLDEN_SOURCE, name) == GOLDEN[name]


@pytest.mark.parametrize("flags", [(), ("-O",), ("-OO",)])
def test_golden_values_under_optimisation(flags):
    """-O and -OO drop assertions and docstrings from byte code, not from what is fingerprinted."""
    code = f"""
        import ast
        from shim._releases.fingerprint import definitions, fingerprint_of
        source = {GOLDEN_SOURCE!r} + "\\ndef last():\\n    'doc'\\n    assert f(1)\\n"
        tree = ast.parse(source)
        for name in {[*GOLDEN, "last"]!r}:
            print(fingerprint_of(definitions(tree, name), name))
    """
    assert output_of(code, flags=flags).split()[:-1] == list(GOLDEN.values())
    assert output_of(code, flags=flags) == output_of(code)


PLAIN = """
    @wraps
    def f(a, b=1, *, c: int = 2):
        x = {"k": a + b}
        return x["k"] if c else None
"""


@pytest.mark.parametrize(
    "same",
    [
        # comments, blank lines, layout, quotes, brackets
        """
        # a comment
        import something

        @wraps  # another
        def f(
            a, b = 0x1,
            *,
            c: int = 2,
        ):

            x = {'k': (a + b),}
            # and one
            return (x["k"]
                    if c else None); pass
        """.replace("; pass", ""),
        # a docstring
        '''
        @wraps
        def f(a, b=1, *, c: int = 2):
            """Docstring.

            Of several lines.
            """
            x = {"k": a + b}
            return x["k"] if c else None
        ''',
        # neighbours of the same scope
        """
        def g(): pass
        @wraps
        def f(a, b=1, *, c: int = 2):
            x = {"k": a + b}
            return x["k"] if c else None
        f.attribute = 1
        table[f] = f
        """,
    ],
)
def test_what_does_not_run_does_not_count(same):
    """Comments, docstrings, positions, formatting and neighbours leave the fingerprint as it is."""
    assert of(same) == of(PLAIN)


def test_docstrings_inside_do_not_count():
    """Those of methods and nested functions are docstrings too."""
    bare = "class C:\n    def m(self):\n        def n():\n            return 1\n        return n\n"
    told = bare.replace("class C:\n", "class C:\n    'doc'\n").replace("return 1", "'doc'\n            return 1")
    assert of(told, "C") == of(bare, "C")


@pytest.mark.parametrize(
    "other",
    [
        PLAIN.replace("a + b", "a - b"),
        PLAIN.replace("b=1", "b=1.0"),
        PLAIN.replace("b=1", "b=True"),
        PLAIN.replace("c: int", "c: float"),
        PLAIN.replace("c: int", "c"),
        PLAIN.replace("@wraps", "@wraps(x)"),
        PLAIN.replace("@wraps", ""),
        PLAIN.replace("*, c", "c"),
        PLAIN.replace('x["k"]', "x['k '].k"),
        PLAIN.replace("def f", "async def f"),
        PLAIN.replace("        return", "        return 1\n        return"),
        "if True:\n" + PLAIN,
        "if a:\n    pass\nelse:\n" + PLAIN,
        "try:\n" + PLAIN + "except ImportError:\n    f = None",
        "try:\n" + PLAIN + "except ImportError:\n    pass",
        dedent(PLAIN) + "f = jit(f)\n",
        dedent(PLAIN) + "if FAST:\n    from fast import f\n",
        dedent(PLAIN) + "def f(): pass\n",
        dedent(PLAIN) + "def g(): pass\ng = f, h = 1, 2\n",
    ],
)
def test_whatever_runs_counts(other):
    """Body, defaults, annotations, decorators, guards, and every further definition of the name."""
    assert of(other) != of(PLAIN)


@pytest.mark.parametrize(
    ("guard", "changed"),
    [
        ("if A:\n    def f(): pass", "if B:\n    def f(): pass"),
        ("if A:\n    def f(): pass", "if not A:\n    pass\nelse:\n    def f(): pass"),
        ("try:\n    import x\nexcept E:\n    def f(): pass", "try:\n    import x\nexcept F:\n    def f(): pass"),
        ("try:\n    import x\nexcept E:\n    def f(): pass", "try:\n    import x\nfinally:\n    def f(): pass"),
        ("with a:\n    def f(): pass", "with b:\n    def f(): pass"),
        ("for i in a:\n    def f(): pass", "for i in b:\n    def f(): pass"),
        ("while a:\n    def f(): pass", "while b:\n    def f(): pass"),
        ("match a:\n    case 1:\n        def f(): pass", "match a:\n    case 2:\n        def f(): pass"),
        ("match a:\n    case 1:\n        def f(): pass", "match a:\n    case 1 if b:\n        def f(): pass"),
    ],
)
def test_guards_count(guard, changed):
    """Under what condition a name is defined is part of what it is."""
    assert of(guard) != of(changed)


def test_only_the_alias_that_binds_the_name_counts_of_an_import():
    """Neighbours in the same import statement come and go."""
    assert of("from a import f, g") == of("from a import b, f, c")
    assert of("from a import f") != of("from b import f")
    assert of("from a import f") != of("from a import g as f")
    assert of("from .a import f") != of("from ..a import f")
    assert of("import a.b", "a") == of("import z, a.b", "a")


def test_constants_and_classes_have_no_signature():
    """The second part says how a target may be called; - stands for not applicable."""
    for text, name in (("x = 1", "x"), ("class C: pass", "C"), ("from a import b", "b"), ("x: int = 1", "x")):
        assert signature_part(of(text, name)) == "-"


def test_the_signature_part_says_how_a_target_may_be_called():
    """Names, kinds and defaults of the parameters count; body and annotations do not."""
    plain = signature_part(of(PLAIN))
    assert len(plain) == 8
    assert signature_part(of(PLAIN.replace("a + b", "0").replace(": int", ": str"))) == plain
    for changed in (("b=1", "b=2"), ("a, b", "a, /, b"), ("*, c", "c"), ("a, b", "q, b"), (" = 2", "")):
        assert signature_part(of(PLAIN.replace(*changed))) != plain


def test_the_signature_part_covers_every_definition():
    """Which of several definitions runs is known at run time only."""
    text = "if A:\n    def f(a): pass\nelse:\n    def f(b): pass\n"
    assert signature_part(of(text)) != signature_part(of(text.replace("f(a)", "f(a, z)")))


def test_methods_of_guarded_and_repeated_classes_are_all_found():
    """A class that is defined twice has two methods of the name."""
    text = "if A:\n    class C:\n        def m(self): pass\nelse:\n    class C:\n        def m(self, x): pass\n"
    tree = ast.parse(text)
    assert len(definitions(tree, "C.m")) == 2
    assert definitions(tree, "C.other") == definitions(tree, "D.m") == []
    assert definitions(ast.parse("def f():\n    def g(): pass"), "f.g") == []


@pytest.mark.parametrize("target", ["", "module", "module:", ":f", "module:a b", "a..b:f", "module:f:g", "a/b:f"])
def test_targets_that_are_no_targets(target):
    """Anything but package.module:Qualified.name is an error."""
    with pytest.raises(SourceError, match="not of the form"):
        split_target(target)


@pytest.fixture
def sources(tmp_path):
    write_file(
        tmp_path / "pack/mod.py",
        """
        class Base:
            def forward(self, x): return x
        class Child(Base):
            pass
        """,
    )
    return Sources([tmp_path])


def test_an_inherited_target_has_the_fingerprint_of_what_it_inherits(sources):
    """The body that runs is that of the class that defines it."""
    inherited = fingerprint(sources, "pack.mod:Child.forward", "pack.mod:Base.forward")
    assert inherited == fingerprint(sources, "pack.mod:Base.forward")


def test_a_class_that_defines_the_name_itself_no_longer_inherits(sources, tmp_path):
    """Else a patch on the subclass would wrap a body that nobody has looked at."""
    write_file(
        tmp_path / "pack/mod.py", "class Base:\n    def forward(s): 0\nclass Child(Base):\n    def forward(s): 1"
    )
    with pytest.raises(SourceError, match="no longer inherits"):
        fingerprint(sources, "pack.mod:Child.forward", "pack.mod:Base.forward")


@pytest.mark.parametrize(
    ("target", "inherits"),
    [
        ("pack.mod:Base.gone", None),
        ("pack.mod:gone", None),
        ("pack.gone:f", None),
        ("pack.mod:Gone.forward", "pack.mod:Base.forward"),
        ("pack.mod:Child.forward", "pack.mod:Base.gone"),
        ("pack.mod:forward", "pack.mod:Base.forward"),
    ],
)
def test_what_is_gone_is_a_source_error(sources, target, inherits):
    """A target, its class, its module, or what it inherits."""
    with pytest.raises(SourceError, match="no "):
        fingerprint(sources, target, inherits)


def test_deep_nesting_is_a_source_error(tmp_path):
    """Both a deep expression and a long chain of elif, which nests as deep, overrun the stack of a plain walk."""
    write_file(tmp_path / "deep.py", "def f():\n    return " + "+".join(["a"] * 3000) + "\n")
    chain = "if a:\n    pass\n" + "elif a:\n    pass\n" * 2000 + "else:\n    def g(): pass\n"
    write_file(tmp_path / "chain.py", chain)
    for target in ("deep:f", "chain:g"):
        with pytest.raises(SourceError, match=r"too deeply|cannot be parsed"):
            fingerprint(Sources([tmp_path]), target)

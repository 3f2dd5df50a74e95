"""The mutants of shim's own code (maintenance/mutations/engine.py): each changes one thing, and no message."""

import ast
from textwrap import dedent

from code_mutants import mutants_of
from unit_helpers import REPOSITORY

SMALL = dedent('''
    """Says."""

    def f(x: int = 3) -> bool:
        "Says."
        if x and not g(x):
            raise ValueError(f"{x or 1}")
        self.kept = any(y for y in reversed(x) if y is not None)
        return x in (1, 2)
''')


def test_each_kind_of_change_is_made_in_the_order_of_the_lines():
    assert [mutant.name for mutant in mutants_of(SMALL)] == [
        "4: constant: 3 -> 4",
        "6: negate: x and not g(x) -> (not (x and (not g(x))))",
        "6: without x: x and not g(x) -> (not g(x))",
        "6: and, or: x and not g(x) -> (x or not g(x))",
        "6: without not g(x): x and not g(x) -> (x)",
        "6: without not: not g(x) -> (g(x))",
        '7: drop: raise ValueError(f"{x or 1}") -> pass',
        "8: drop: self.kept = any(y for y in reversed(x) if y is not None) -> pass",
        "8: name: any -> all",
        "8: order: reversed(x) -> x",
        "8: compare: y is not None -> (y is None)",
        "9: return: return x in (1, 2) -> return None",
        "9: compare: x in (1, 2) -> (x not in (1, 2))",
        "9: constant: 1 -> 2",
        "9: constant: 2 -> 3",
    ]


def test_a_mutant_is_another_program():
    text = (REPOSITORY / "shim/_engine/chains.py").read_text("utf-8")
    programs = {ast.dump(ast.parse(mutant.applied(text))) for mutant in mutants_of(text)}
    assert len(programs) > 100 and ast.dump(ast.parse(text)) not in programs

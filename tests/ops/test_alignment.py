"""The multiple of a packed row. tests/pairs/test_alignment.py holds it against what upstream says."""

import enum
import itertools

import pytest

from shim.ops import fp8_alignment


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(None, 1), ("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32), ("nvfp4", 128)],
)
def test_one_rank_needs_what_the_recipe_needs(recipe, expected):
    assert fp8_alignment(recipe) == expected
    assert fp8_alignment(recipe, tp=4) == expected, "without sequence parallelism every rank has all tokens"


@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise", "mxfp8"])
def test_it_is_the_smallest_length_that_suits_every_rank_and_every_chunk(recipe):
    def suits(length, ranks, cp):
        return (
            length % ranks == 0 and length // ranks % fp8_alignment(recipe) == 0 and (cp == 1 or length % (2 * cp) == 0)
        )

    for tp, cp, parallel in itertools.product((1, 2, 3, 8), (1, 2, 3, 4), (False, True)):
        ranks = cp * (tp if parallel else 1)
        smallest = next(length for length in itertools.count(1) if suits(length, ranks, cp))
        assert fp8_alignment(recipe, tp, cp, parallel) == smallest


def test_the_least_common_multiple_alone_would_leave_a_rank_too_few():
    assert fp8_alignment("mxfp8", cp=2) == 64  # and not lcm(32, 4)
    assert fp8_alignment("mxfp8", tp=4, sequence_parallel=True) == 128
    assert fp8_alignment("blockwise", tp=2, cp=2, sequence_parallel=True) == 512


def test_a_further_multiple_of_each_rank():
    assert fp8_alignment(None, tokens_per_rank=128) == 128
    assert fp8_alignment("mxfp8", tp=2, sequence_parallel=True, tokens_per_rank=48) == 192


def test_recipe_objects_are_known_by_their_class():
    class MXFP8BlockScaling:
        pass

    class OfAUser(MXFP8BlockScaling):
        pass

    class CustomRecipe:
        quantization_alignment = 64

    class Fp8Recipe(str, enum.Enum):
        mxfp8 = "mxfp8"

    assert [fp8_alignment(r) for r in (MXFP8BlockScaling(), OfAUser(), CustomRecipe(), Fp8Recipe.mxfp8)] == [
        32,
        32,
        64,
        32,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("custom",), "no known alignment"),
        (("hybrid",), "known are delayed"),
        ((object(),), "class object"),
        (("mxfp8", 0), "tp is 0"),
        (("mxfp8", 1, 0), "cp is 0"),
    ],
)
def test_what_is_unknown_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        fp8_alignment(*arguments)

"""The words of a shell script: where one ends, whatever is quoted or nested in it."""

import pytest

from shim._configs.shell_words import ARRAY, HERE, HERE_QUOTED, Token, tokens_of


def words(text):
    return [token.text for token in tokens_of(text)]


@pytest.mark.parametrize(
    "text, found",
    [
        ("a 'b c' \"d $e\"f", ["a", "'b c'", '"d $e"f']),
        ("a \\\n  b # c 'd\ne", ["a", "b", "\n", "e"]),
        ("a$(b \"c)\" 'd)')e ${f:-g h}", ["a$(b \"c)\" 'd)')e", "${f:-g h}"]),
        ("a=#b c#d", ["a=#b", "c#d"]),
        ("a && b||c;d", ["a", "&&", "b", "||", "c", ";", "d"]),
        ('a \\"b c\\"', ["a", '\\"b', 'c\\"']),
        ("`a b` c", ["`a b`", "c"]),
        ("'never closed", ["'never closed"]),
    ],
)
def test_words_and_operators(text, found):
    assert words(text) == found


def test_an_array_holds_its_words_and_none_of_its_comments():
    text = 'A+=(\n  --a 1 # don\'t (\n  # --b 2\n  "--c d"\n)\nnext'
    array, newline, last = tokens_of(text)
    assert array == Token(ARRAY, "A+=", ("--a", "1", '"--c d"')) and (newline.text, last.text) == ("\n", "next")


def test_a_here_document_stands_in_the_place_of_its_operator():
    assert list(tokens_of("cat <<EOF > f\na $b\nEOF\nc"))[1] == Token(HERE, "a $b")
    assert words("cat <<EOF > f\na $b\nEOF\nc") == ["cat", "a $b", ">", "f", "\n", "c"]
    assert list(tokens_of("cat <<-'E O'\n\ta $b\n\tE O\n"))[1] == Token(HERE_QUOTED, "\ta $b")

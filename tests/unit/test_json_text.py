"""JSON that people write: what stands twice is an error with line and place, as in YAML."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shim
from shim._matrix.load import load_matrix
from shim._planning.options import resolve
from shim._releases.files import JsonTextError, line_of, read_json, unknown_key


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('{"a": 1, "a": 2}', 1, "duplicate key 'a' at the top"),
        ('{\n"a": 1,\n"b": {"a": 1},\n"a": 2}', 4, "duplicate key 'a' at the top"),
        ('{"a": [{}, {"b": 1,\n"c": 2,\n\n"b": 1}]}', 4, "duplicate key 'b' in a.1"),
        ('{"a": {"a": {"\\u0061": 1,\n"a": {"a": 1}}}}', 2, "duplicate key 'a' in a.a"),
        ('{"a{,\\"": [[], [1, 2], {"x": 1}],\n"a{,\\"": 2}', 2, "duplicate key 'a{,\"' at the top"),
        ('{"": {"": 1,\n"": 2}}', 2, "duplicate key '' in "),
        ('{"a": 1,\n}', 2, "Expecting|Illegal"),
        ("", 1, "Expecting"),
        ("[1, NaN]", 1, "NaN is not JSON"),
        ('{"a": -Infinity}', 1, "-Infinity is not JSON"),
        ("[" * 100_000, 1, "nested too deeply"),
        (b'{"a": "\xff"}', 1, "utf-8"),
        ('{"a": 1}'.encode("utf-16"), 1, "utf-8"),
    ],
)
def test_errors_say_the_line_the_key_and_the_place(text, line, said):
    """A text that means two things means nothing."""
    with pytest.raises(JsonTextError, match=said) as caught:
        read_json(text)
    assert caught.value.line == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_what_is_right_is_read_as_it_is(value, indent, ascii):
    """And the line of each key is where it stands."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read_json(text) == read_json(text.encode("utf-8", "surrogatepass") if ascii else text) == value
    if isinstance(value, dict) and indent:
        for key in value:
            line = text.split("\n")[line_of(text, (key,)) - 1]
            assert line.startswith(" " + json.dumps(key, ensure_ascii=ascii) + ":")


def test_an_unknown_key_is_named_with_the_known_ones():
    text = '{"a": {\n"b": 1,\n"c": 2}}'
    unknown_key(text, {"b": 1}, ("a",), ("b",))
    with pytest.raises(JsonTextError, match="unknown key 'c' in a; known are b") as caught:
        unknown_key(text, {"b": 1, "c": 2}, ("a",), ("b",))
    assert caught.value.line == 3


@pytest.mark.parametrize("text", ['{"paged-stash": {}, "paged-stash": {}}', '{"paged-stash": {"a": 1, "a": 2}}'])
def test_options_of_the_environment_are_read_by_the_same_rule(monkeypatch, text):
    """MEGATRON_SHIM_OPTIONS, and --options."""
    monkeypatch.setenv("MEGATRON_SHIM_OPTIONS", text)
    with pytest.raises(shim.OptionError, match=r"MEGATRON_SHIM_OPTIONS .* line 1: duplicate key '(paged-stash|a)' "):
        resolve(load_matrix())

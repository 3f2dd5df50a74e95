"""JSON that people write: what stands twice is an error, as in YAML."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shim
from shim._matrix.load import load_matrix
from shim._planning.options import resolve
from shim._releases.files import read_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": [{}, {"b": 1,\n"c": 2,\n\n"b": 1}]}', "duplicate key 'b'"),
        ('{"a": {"a": {"\\u0061": 1,\n"a": {"a": 1}}}}', "duplicate key 'a'"),
        ('{"a": 1,\n}', "(Expecting|Illegal).* line "),
        ("", "Expecting"),
        ("[1, NaN]", "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "utf-8"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
    ],
)
def test_a_text_that_means_two_things_means_nothing(text, said):
    with pytest.raises(ValueError, match=said):
        read_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


@settings(deadline=None)
@given(JSON, st.sampled_from([None, 1]), st.booleans())
def test_what_is_right_is_read_as_it_is(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read_json(text) == read_json(text.encode("utf-8", "surrogatepass") if ascii else text) == value


@pytest.mark.parametrize("text", ['{"paged-stash": {}, "paged-stash": {}}', '{"paged-stash": {"a": 1, "a": 2}}'])
def test_options_of_the_environment_are_read_by_the_same_rule(monkeypatch, text):
    """MEGATRON_SHIM_OPTIONS, and --options."""
    monkeypatch.setenv("MEGATRON_SHIM_OPTIONS", text)
    with pytest.raises(shim.OptionError, match=r"MEGATRON_SHIM_OPTIONS .* duplicate key '(paged-stash|a)'"):
        resolve(load_matrix())

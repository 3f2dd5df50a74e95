"""shim.compatible: a mark on a function, which changes nothing else."""

import pytest

import shim
from shim._compatible import marks_of

TARGET = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"


def function(self):
    return self


def test_the_same_object_comes_back():
    """Also one in a staticmethod or a classmethod, and a bound method."""

    class Own:
        def method(self):
            pass

        @classmethod
        def build(cls):
            pass

    for given in (function, staticmethod(lambda: None), classmethod(lambda cls: None), Own().method, Own.build, Own):
        assert shim.compatible(TARGET, version="0.1.0")(given) is given
        assert marks_of(given) == {TARGET: "0.1.0"}
    assert function(3) == 3


def test_a_mark_without_a_version_is_of_the_running_one():
    @shim.compatible(TARGET)
    @shim.compatible("a.b:C.d", version="0.0.7")
    def marked():
        pass

    assert marks_of(marked) == {TARGET: shim.__version__, "a.b:C.d": "0.0.7"}


def test_what_nobody_marked_has_no_marks():
    assert marks_of(lambda: None) == marks_of(None) == marks_of(len) == {}


@pytest.mark.parametrize("target", ["GPTModel._postprocess", "a.b", "a:", ":b", "a b:c", "", None, function])
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(shim.OptionError, match="is not of the form"):
        shim.compatible(target)


def test_a_version_that_is_none_is_refused():
    for version in ("", "new", 1.0):
        with pytest.raises(shim.OptionError, match=r"such as '"):
            shim.compatible(TARGET, version=version)


def test_an_object_that_takes_no_mark_is_refused():
    with pytest.raises(shim.OptionError, match="takes no mark"):
        shim.compatible(TARGET)(len)

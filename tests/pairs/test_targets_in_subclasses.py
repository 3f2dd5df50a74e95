"""check() takes no function of shim's own for an override of a patched method, on a class whose base is patched too."""

import pytest
import torch
from subclass_cases import bare, nested, of_a_user

import shim
from shim import testing

CELLS = "every"

NESTED = nested(shim.plan())

pytestmark = pytest.mark.skipif(not NESTED, reason="no patch here binds a method in a class and in its subclass")


@pytest.fixture(autouse=True, scope="module")
def all_patches():
    with testing.megatron_on_cpu(), shim.patched():
        yield


@pytest.mark.parametrize(("id", "target", "heir"), NESTED)
def test_a_function_of_shims_in_a_subclass_overrides_nothing(id, target, heir):
    found = shim.check(torch.nn.ModuleList([bare(heir)]))[id]
    assert found.state == "applied", found.reason
    assert not any(heir.__qualname__ in said for said in found.others)


@pytest.mark.parametrize(("id", "target", "heir"), NESTED)
def test_a_function_of_a_user_above_it_is_still_seen(id, target, heir):
    cls = of_a_user(heir, target)
    found = shim.check(torch.nn.ModuleList([bare(cls)]))[id]
    assert found.state in ("unknown", "shadowed")
    assert cls.__qualname__ in found.reason and "overrides" in found.reason

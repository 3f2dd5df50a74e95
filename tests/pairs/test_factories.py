"""Factories run under the engine's lock: none of them imports anything, with Transformer Engine neither."""

import pytest
from factories import imports_of_factories

import shim

CELLS = "every"

PLAN = shim.plan()


@pytest.mark.parametrize("id", [id for id, decision in PLAN.decisions.items() if decision.wanted])
def test_factories_import_nothing(id):
    assert imports_of_factories(PLAN, id) == []

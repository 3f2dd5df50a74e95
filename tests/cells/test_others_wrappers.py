"""A wrapper of somebody's on each target in turn, put there before apply(): no patch is refused for what it hides.

A patch holds beneath it or around it, or is in conflict and says so.
"""

import pytest
from thorough import times
from wrapper_cases import Called, around, functions, states_beside_a_wrapper

CELLS = {"0.18.2": "all"}


FUNCTIONS = list(functions("megatron"))


@pytest.mark.parametrize(
    ("kind", "target", "owner", "name"),
    [(around, *found) for found in FUNCTIONS] + [(Called, *found) for found in FUNCTIONS[:: times(4, 1)]],
    ids=str,
)
def test_a_wrapper_that_takes_any_arguments_is_no_reason_to_refuse_a_patch(kind, target, owner, name, monkeypatch):
    states = states_beside_a_wrapper(target, owner, name, kind, monkeypatch)
    assert set(states.values()) <= {"applied", "conflict", "pending", "idle", "inactive"}, states

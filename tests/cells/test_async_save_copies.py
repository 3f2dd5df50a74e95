"""async-save-copies: a copy lives as long as its process, and no longer."""

import pytest
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from needed import needed

import shim
from shim.patches.megatron_core.async_save_copies.proof import nothing, request

CELLS = {"0.16.0": "all"}

ID = "async-save-copies"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def test_copies_go_when_the_process_has_ended():
    """Of one save after another."""
    caller, copies = TemporalAsyncCaller(), []
    with shim.patched(only=[ID], require=[ID]):
        for number in range(2):
            caller.schedule_async_call(request(copies))
            assert copies[number]() is not None
            caller.close()
            assert copies[number]() is None
        assert shim.status()[ID].others == ()  # upstream's decorator is a context manager of its own
    assert not [name for name in vars(caller) if name.startswith("_shim")]


def test_copies_go_if_the_check_finds_the_end():
    caller, copies = TemporalAsyncCaller(), []
    with shim.patched(only=[ID], require=[ID]):
        caller.schedule_async_call(request(copies))
        assert caller.is_current_async_call_done(blocking=True)
    assert copies[0]() is None


def test_a_request_without_copies_is_stocks():
    caller = TemporalAsyncCaller()
    with shim.patched(only=[ID], require=[ID]):
        caller.schedule_async_call(AsyncRequest(None, (), []))
        assert caller.process is None
        caller.schedule_async_call(AsyncRequest(nothing, (1, 2), []))
        caller.close()

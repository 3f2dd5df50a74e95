"""Two callers of apply() in one process on a real release: the later says what it takes from the earlier."""

import shim

CELLS = {"0.17.0": "all"}

ABOUT = ["rope-thd"]  # the patches, see chosen.py


def test_a_plain_call_says_that_it_brings_back_what_a_library_had_excluded(caplog):
    """The patches are those of this release, and their functions are really bound again."""
    wanted = [id for id, decision in shim.plan().decisions.items() if decision.wanted]
    try:
        first = shim.apply(exclude=wanted[:2])
        assert all(first[id].state == "excluded" for id in wanted[:2])
        caplog.clear()
        shim.apply(exclude=wanted[:2])
        assert not any("changes the request of" in record.getMessage() for record in caplog.records)
        report = shim.apply()
        (line,) = [record.getMessage() for record in caplog.records if "changes the request of" in record.getMessage()]
        assert f"applied now, and not before: {', '.join(wanted[:2])}." in line and line.count(__file__) == 2
        assert all(report[id].state != "excluded" for id in wanted[:2])
    finally:
        shim.revert()

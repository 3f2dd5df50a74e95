"""What check(model) says concerns a model, on a real release: a dense one, one with adapters, experts and MTP."""

import pytest

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.12.0": "all", "0.19.2": "all"}

ABOUT = []
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def concerned(**options):
    """The report for a small model, and the applied patches that concern it."""
    adapters = options.pop("adapters", False)
    with testing.layout_initialised(Layout()), shim.patched():
        model = testing.build_gpt(**options)
        if adapters:
            testing.add_lora(model)
        report = shim.check(model)
        return report, {id for id in report.applied if report[id].concerns == "yes"}


def test_a_dense_model_is_no_concern_of_most():
    report, found = concerned(mtp_num_layers=None)
    named = ("mtp", "moe", "mla", "expert")
    assert not [id for id in found if id.startswith(named)]
    off = {id for id in report if report[id].state == "inactive" and report[id].concerns == "yes"}
    assert f"{len(found | off)} of them concern" in str(report).splitlines()[1]  # a feature that is off counts as well
    assert " others applied (-v)" in str(report) and len(found) < 6


@pytest.mark.parametrize(
    "options, id",
    [
        ({"mtp_num_layers": None, "adapters": True, **FULL}, "frozen-recompute"),
        ({"mtp_num_layers": 1, **FULL}, "mtp-recompute"),
    ],
)
def test_what_a_model_has_concerns_it(options, id):
    report, found = concerned(**options)
    assert id in found or report[id].state == "upstream"
    without = {**options, "mtp_num_layers": None, "adapters": False}
    assert id not in concerned(**without)[1]


def test_what_a_model_does_not_show_is_not_known():
    """Packed rows come with the data, and a checkpoint with the trainer."""
    report, _ = concerned(mtp_num_layers=None)
    assert (report["rope-thd"].concerns, report["rope-thd"].not_known) == ("unknown", ("packed",))
    assert "[memory: packed]" in str(report) or report["rope-thd"].state != "applied"


def test_the_line_of_check_names_them(caplog):
    with testing.layout_initialised(Layout()), shim.patched(), caplog.at_level("INFO", "shim"):
        shim.check(testing.build_gpt(mtp_num_layers=1, **FULL))
    (said,) = [record.getMessage() for record in caplog.records if "digest" in record.getMessage()]
    assert "concern this model: silent: " in said and "fp8-fp4-recompute" in said


def concerns_under_tp():
    with testing.layout_initialised(Layout(tp=2)), shim.patched():
        report = shim.check(testing.build_gpt(mtp_num_layers=None))
        return report["tp-attributes"].concerns, report["broadcast-data-group"].concerns


def test_sizes_of_groups_count(ranks2):
    """TP 2 of the parallel state, also if a config does not say so."""
    assert ranks2.run(concerns_under_tp) == [("yes", "yes")] * 2

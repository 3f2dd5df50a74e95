"""Notes of patches that have a file notes.py, in `shim plan` and `shim doctor`."""

from types import SimpleNamespace

from shim._tools.notes import notes_of

OFFLOAD = "shim.patches.megatron_core.te_cpu_offload"


def made(wanted):
    decision = SimpleNamespace(id="te-cpu-offload", wanted=wanted, action="apply")
    matrix = SimpleNamespace(patches={"te-cpu-offload": SimpleNamespace(module=OFFLOAD)})
    environment = SimpleNamespace(installed={}, versions={"transformer-engine": SimpleNamespace(release=(2, 10))})
    return SimpleNamespace(decisions={"te-cpu-offload": decision}, matrix=matrix, environment=environment)


def test_a_patch_that_is_wanted_has_its_say(monkeypatch):
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    (note,) = notes_of(made(True))
    assert note.startswith("te-cpu-offload: ") and "NVTE_CPU_OFFLOAD_V1" in note
    assert notes_of(made(False)) == []

"""Notes of patches that have a file notes.py, in `shim plan` and `shim doctor`."""

import importlib
from types import SimpleNamespace

from unit_helpers import write_file

from shim._tools.notes import notes_of

FSDP = "shim.patches.megatron_core.fsdp_optimizer_state"
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


def test_a_copy_of_megatron_fsdp_is_told(tmp_path, monkeypatch):
    """It is a distribution of its own, and nothing in it is patched."""
    notes = importlib.import_module(f"{FSDP}.notes").notes
    assert list(notes({})) == []
    write_file(tmp_path / "megatron_fsdp" / "__init__.py", "raise RuntimeError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (note,) = notes({})
    assert "megatron-fsdp is installed" in note and "import megatron.core.distributed.fsdp" in note

"""What `shim doctor` says of the machine, of packages, and of the patches of others."""

import stat

import pytest
from unit_helpers import BROKEN, PATCH, metadata, write_file

import shim
from shim._tools import others as _others
from shim._tools import surroundings as _surroundings
from shim._tools.doctor import as_text, examine


@pytest.fixture
def here(world, monkeypatch):
    """The fake world, as it is where a trainer runs."""
    write_file(world.own / "trainer_patches" / "roll_fix.py", PATCH)
    monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
    return world.install(BROKEN)


def nvidia_smi(folder, monkeypatch, script):
    """A command of that name that is all there is on PATH besides the shell's."""
    file = write_file(folder / "nvidia-smi", "#!/bin/sh\n" + script)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_and_driver_are_told(here, tmp_path, monkeypatch):
    """By nvidia-smi in its own words: torch is not imported. There is no GPU here, so a script stands in for it."""
    row = "570.86.15, NVIDIA H100 80GB HBM3, 81559 MiB, 9.0"
    nvidia_smi(tmp_path / "bin", monkeypatch, f'echo "{row}"; echo "{row}"')
    found = examine()
    assert found["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB, 9.0"] * 2
    assert found["machine"]["driver"] == "570.86.15"
    assert (
        "- GPU 1: NVIDIA H100 80GB HBM3, 81559 MiB, 9.0\n- driver 570.86.15; no torch that is built for CUDA"
        in as_text(found)
    )


@pytest.mark.parametrize(
    ("script", "said"), [("exec sleep 30", "said nothing for"), ("echo no device; exit 9", "no device")]
)
def test_a_driver_that_hangs_or_fails_is_a_problem(here, tmp_path, monkeypatch, script, said):
    """And does not keep the rest from being told."""
    nvidia_smi(tmp_path / "bin", monkeypatch, script)
    monkeypatch.setattr(_surroundings, "PATIENCE", 0.2)
    found = examine()
    assert any("nvidia-smi" in problem and said in problem for problem in found["problems"])
    assert found["plan"]["roll-fix"]["action"] == "apply"


def test_cuda_and_nccl_are_told_from_files(here, tmp_path, monkeypatch):
    """torch's version file, the toolkit's, metadata, and the name of the library that is loaded."""
    write_file(
        here.site / "torch/version.py",
        "from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
    )
    write_file(here.site / "torch/__init__.py", "raise RuntimeError('torch was imported')\n")
    metadata(here.site, "2.27.3", "nvidia-nccl-cu12")
    write_file(tmp_path / "cuda/version.json", '{"cuda": {"version": "12.8.1"}}')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = examine()["machine"]
    assert found["cuda"] | {"visible": None} == {"torch": "cuda 12.8", "toolkit": "12.8.1", "visible": None}
    assert found["libraries"]["nccl"] == "2.27.3 (nvidia-nccl-cu12)"
    write_file(tmp_path / "lib/libnccl.so.2.26.2", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    (here.site / "nvidia_nccl_cu12-2.27.3.dist-info/METADATA").unlink()
    (here.site / "nvidia_nccl_cu12-2.27.3.dist-info").rmdir()
    assert examine()["machine"]["libraries"]["nccl"] == f"2.26.2 ({tmp_path / 'lib/libnccl.so.2.26.2'})"


def test_packages_are_found_and_not_imported(here):
    """With metadata or without: images put source trees on PYTHONPATH. A folder of that name is no package."""
    raising = "raise RuntimeError('a package was imported')\n"
    write_file(here.site / "verl/__init__.py", raising)
    write_file(here.site / "flash_attn/__init__.py", raising)
    metadata(here.site, "2.7.4", "flash-attn")
    (here.site / "slime").mkdir()
    found = examine()["packages"]
    assert found["verl"] == {"version": None, "location": str(here.site / "verl")}
    assert found["flash-attn"] == {"version": "2.7.4", "location": str(here.site / "flash_attn")}
    assert "slime" not in found


def test_variables_of_others_are_shown(here, monkeypatch):
    """Those that change what runs."""
    for name in ("NVTE_DEBUG", "NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS", "MY_TOKEN"):
        monkeypatch.setenv(name, "1")
    found = examine()["variables"]
    assert {"NVTE_DEBUG", "NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(found) and "MY_TOKEN" not in found


TRAINER = """
    import megatron.core.roll as m
    from megatron.core import roll as again, sort
    from megatron.core.roll import Layer as Base

    def patch(args):
        from elsewhere import Layer
        m.roll = None
        setattr(again, "helper", None)
        Base.forward = lambda self, x: x
        args.roll = 1
        Layer.forward = None
        sort.forward = None
        kept = m.roll
"""


def test_assignments_in_a_trainers_sources_are_found(here):
    """The lines that would replace a target or a body relied on, and none that merely look like it."""
    write_file(here.site / "verl/__init__.py", "")
    file = write_file(here.site / "verl/patches.py", TRAINER)
    write_file(here.site / "verl/broken.py", "m.roll = = 1")
    found = [other for other in examine()["others"] if not other["loaded"]]
    assert {(o["target"], o["where"]) for o in found} == {
        ("megatron.core.roll:roll", f"{file}:7"),
        ("megatron.core.roll:helper", f"{file}:8"),
        ("megatron.core.roll:Layer.forward", f"{file}:9"),
    }
    assert {o["who"] for o in found} == {"verl"}
    text = as_text(examine())
    assert f"- verl in {file}:9: `megatron.core.roll:Layer.forward` (roll-fix, faster-forward)" in text


def test_what_is_loaded_and_replaced_is_told(here):
    """When the doctor is asked inside a process that has been patched by another; shim's own are not others'."""
    (here.site / "megatron/core/__init__.py").write_text("")
    import megatron.core.roll as loaded

    with shim.patched():
        assert loaded.roll.__code__.co_filename.endswith("roll_fix.py")
        assert list(_others.loaded_foreign(here.plan())) == []
    loaded.roll = eval("lambda x, shift=-1: x", {"__name__": "their_patches"})
    found = dict(_others.loaded_foreign(here.plan()))
    assert found.keys() == {"megatron.core.roll:roll"} and "their_patches" in found["megatron.core.roll:roll"]


@pytest.mark.parametrize("place", ["transformer_engine/wheel_lib", "transformer_engine", "."])
def test_transformer_engine_without_its_core_library_is_a_problem(here, world, place):
    """Its import raises no ImportError then, so that of megatron.core fails as well. --no-deps leaves such a one."""
    metadata(here.site, "2.9.0", "transformer-engine")
    write_file(here.site / "transformer_engine/__init__.py", "")
    write_file(here.site / "torch/__init__.py", "")
    metadata(here.site, "2.9.1", "torch")
    [problem] = examine()["problems"]
    assert problem.startswith("transformer-engine 2.9.0 has no core library (libtransformer_engine.so)")
    assert "megatron.core" in problem and "transformer_engine_on_cpu()" in problem
    write_file(here.site / place / "libtransformer_engine.so", "")
    assert examine()["problems"] == []


def test_nothing_installed_is_a_problem(here, world):
    """Which the wrong Python, or a forgotten PYTHONPATH, looks like."""
    world.on_path(world.own)
    assert any(problem.startswith("Neither megatron-core nor") for problem in examine()["problems"])


def test_a_machine_without_torch_is_a_problem(here):
    """Every patch would stay pending there, and no import of megatron-core can work."""
    assert any("torch is not installed" in problem for problem in examine()["problems"])
    write_file(here.site / "torch/__init__.py", "")
    metadata(here.site, "2.9.1", "torch")
    assert not any("torch is not installed" in problem for problem in examine()["problems"])

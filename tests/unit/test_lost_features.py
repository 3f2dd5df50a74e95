"""What megatron-core loses with a Transformer Engine: told from sources, judged by hand, said of the installed pair."""

import json
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from unit_helpers import MATRIX, REPOSITORY, megatron, metadata, write_file

from shim._matrix.load import load_matrix
from shim._releases.sources import Sources
from shim._te import features as _features
from shim._te.features import places, remedy_for
from shim._te.names import wanted_names
from shim._te.tables import FILE, MEGATRON, TE, expanded, remedies, spans, table
from shim._tools.cli import main
from shim.maintenance.te_interpreter import Megatron, Pair, TeRelease
from shim.maintenance.te_losses import MORE_TE, measure_losses, render_losses

ENGINE_FILES = {
    "__init__.py": "",
    "common/__init__.py": "",
    "common/recipe.py": "class Format: pass\n",
    "pytorch/__init__.py": "from .linear import Linear\nfrom .state import State\n",
    "pytorch/linear.py": "class Linear: pass\n",
    "pytorch/state.py": "class State:\n    @classmethod\n    def skip(cls): pass\n",
}
EXTENSION = "megatron.core.extension"


@pytest.fixture
def losses(tmp_path):
    """What is lost by a module of megatron-core, `extension`, and others, with a Transformer Engine of a version."""

    def measured(text, version="2.5.0", **others):
        for name, content in ENGINE_FILES.items():
            write_file(tmp_path / "te" / "transformer_engine" / name, content)
        megatron(tmp_path / "mc", "0.16.0", {"extension.py": text, **{f"{n}.py": t for n, t in others.items()}})
        engine = TeRelease(Version(version), Sources([tmp_path / "te"]))
        opened = Megatron(Sources([tmp_path / "mc"]), tmp_path / "mc" / "megatron" / "core")
        found = {}
        for loss in Pair(opened, engine).losses():
            name = loss.name.removeprefix("transformer_engine.pytorch:")
            found.setdefault(name, []).append(f"{loss.module.removeprefix('megatron.core.')}: {loss.what}")
        return found

    return measured


GUARDED = """
    try:
        from transformer_engine.pytorch import Gone, Linear
        fused = Gone.apply
        HAVE = True
    except ImportError:
        {handler}
"""


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        ("fused = None", ["fused=None"]),
        ("HAVE = False", ["HAVE=False"]),
        ("fused, HAVE = None, False", ["HAVE=False"]),
        ("HAVE = Linear = fused = Mock()", ["HAVE=Mock()"]),
        ("pass", ["HAVE is undefined"]),
        ("from transformer_engine.pytorch import Linear as fused\n        HAVE = True", []),
    ],
)
def test_what_a_handler_leaves_behind_is_lost(losses, handler, what):
    """What it sets, a flag before the names themselves; else what nobody defined; nothing where it falls back."""
    assert losses(GUARDED.format(handler=handler)) == ({"Gone": [f"extension: {w}" for w in what]} if what else {})


def test_functions_that_the_body_would_have_defined_are_lost(losses):
    """Undefined where the handler passes, and they are not looked into, since they are not there."""
    text = """
        try:
            from transformer_engine.pytorch import Gone
            def fused(x):
                import transformer_engine.nowhere
                return Gone.apply(x)
        except ImportError:
            pass
    """
    assert losses(text) == {"Gone": ["extension: fused is undefined"]}


def test_all_missing_names_of_a_body_are_named(losses):
    """Whoever gives back only the first is stopped by the second."""
    text = """
        try:
            from transformer_engine.pytorch import One
            from transformer_engine.pytorch.two import Two
            fused = One
        except ImportError:
            fused = None
    """
    found = losses(text)
    assert found == {"One": ["extension: fused=None"], "transformer_engine.pytorch.two:Two": ["extension: fused=None"]}


def test_nothing_is_lost_where_all_is_there(losses):
    """Members of classes and modules included."""
    text = """
        import transformer_engine as te
        from transformer_engine.pytorch import State
        def f():
            State.skip()
            return te.common.recipe.Format, te.pytorch.Linear, te.__version__, State.__init__
    """
    assert losses(text) == {}


@pytest.mark.parametrize(
    ("gate", "gone"),
    [
        ('is_te_min_version("2.5.0")', True),
        ('is_te_min_version("2.5.0", check_equality=False)', False),
        ('is_te_min_version("2.7.0.dev0")', False),
        ('HAVE_TE and is_te_min_version("2.7.0.dev")', False),
        ('not is_te_min_version("2.7.0")', True),
        ('get_te_version() >= PkgVersion("2.3.0")', True),
        ('get_te_version() < PkgVersion("2.3.0")', False),
        ('unknown() or is_te_min_version("2.4")', True),
        ('unknown() and is_te_min_version("2.7")', False),
        ("unknown()", True),
        ("TYPE_CHECKING", False),
        ("LATE", False),
    ],
)
def test_gates_of_versions_are_respected(losses, gate, gone):
    """What is imported behind a gate that the release does not pass is not lost; an undecided gate may open."""
    text = f"""
        import transformer_engine
        HAVE_TE = True
        LATE = is_te_min_version("2.6.0")
        if {gate}:
            from transformer_engine.pytorch import Gone
        else:
            Gone = None
        def at_call():
            if {gate}:
                return transformer_engine.pytorch.Gone2
    """
    found = losses(text)
    assert set(found) == ({"Gone", "Gone2"} if gone else set())
    if gone:
        assert found["Gone"] == ["extension: its import raises ImportError"]
        assert found["Gone2"] == ["extension: at_call raises AttributeError"]


def test_a_release_that_is_refused_by_hand_loses_nothing(losses):
    """A body that raises ImportError below a version is a gate too."""
    text = """
        MIN = Version("{}")
        try:
            import transformer_engine as te
            mine = Version(te.__version__)
            if mine < MIN:
                raise ImportError("too old")
            from transformer_engine.pytorch import Gone
            HAVE = True
        except (ImportError, ModuleNotFoundError):
            HAVE = False
    """
    assert losses(text.format("2.19.0.dev0")) == {}
    assert losses(text.format("2.4")) == {"Gone": ["extension: HAVE=False"]}


def test_a_handler_counts_only_for_what_it_catches(losses):
    """A missing name is no ModuleNotFoundError, a missing module is an ImportError as well, an attribute neither."""
    text = "try:\n    {}\nexcept {}:\n    x = None\n"
    name, module = "from transformer_engine.pytorch import x", "from transformer_engine.nowhere import x"
    fails = ["extension: its import raises ImportError"]
    assert losses(text.format(name, "ModuleNotFoundError")) == {"x": fails}
    assert losses(text.format(module, "ImportError")) == {"transformer_engine.nowhere:x": ["extension: x=None"]}
    attribute = "import transformer_engine as te; x = te.pytorch.Gone"
    assert losses(text.format(attribute, "ImportError")) == {"Gone": ["extension: its import raises AttributeError"]}
    assert losses(text.format(attribute, "(ImportError, AttributeError)")) == {"Gone": ["extension: x=None"]}


def test_fallbacks_within_a_handler_are_followed(losses):
    """The second try may be of Transformer Engine as well, or of a package that is rarely there."""
    text = """
        try:
            from transformer_engine.pytorch import new as offload
        except ImportError:
            try:
                from transformer_engine.pytorch import {} as offload
            except ImportError:
                offload = None
    """
    assert losses(text.format("Linear")) == {}
    assert losses(text.format("older")) == {"new": ["extension: offload=None"], "older": ["extension: offload=None"]}
    apex = """
        try:
            from transformer_engine.pytorch import Linear, Gone
            norm = Linear
        except ImportError:
            try:
                import amp_C
                norm = amp_C.norm
            except ImportError:
                from megatron.core.utils import slow
                norm = slow
    """
    assert losses(apex) == {"Gone": ["extension: norm=megatron.core.utils.slow"]}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return State.gone()", "f raises AttributeError"),
        ("from transformer_engine.pytorch import gone", "f raises ImportError"),
        ("if hasattr(State, 'gone'):\n        return State.gone()", ""),
        ("if not hasattr(State, 'gone'):\n        return\n    State.gone()", ""),
        ("if hasattr(State, 'skip'):\n        return State.skip()\n    State.gone()", ""),
        ("assert is_te_min_version('2.6')\n    State.gone()", ""),
        ("return hasattr(State, 'gone') and State.gone()", ""),
        ("return State.gone() if is_te_min_version('2.6') else None", ""),
        ("if x:\n        return\n    elif y:\n        State.gone()", "f raises AttributeError"),
        ("if x:\n        return 1\n    else:\n        return 2\n    State.gone()", ""),
        ("for _ in x:\n        break\n    State.gone()", "f raises AttributeError"),
        ("with x:\n        State.gone()", "f raises AttributeError"),
        ("def inner():\n        return State.gone()\n    return inner", "f raises AttributeError"),
        ("State = x\n    State.gone()", ""),
        ("try:\n        State.gone()\n    except AttributeError:\n        return None", "f goes on without it"),
        (
            "try:\n        State.gone()\n    except AttributeError:\n        raise ValueError('x')",
            "f raises ValueError",
        ),
        ("try:\n        State.gone()\n    finally:\n        x()", "f raises AttributeError"),
        (
            "try:\n        from transformer_engine.pytorch import gone\n"
            "    except ImportError:\n        from transformer_engine.pytorch import Linear as gone",
            "",
        ),
    ],
)
def test_what_a_function_would_read_when_called(losses, body, what):
    """With the function's name, and whether it is guarded or caught there."""
    found = losses(f"from transformer_engine.pytorch import State\ndef f(x, y):\n    {body}\n")
    assert [place for places in found.values() for place in places] == ([f"extension: {what}"] if what else [])


def test_methods_of_a_class_that_refuses_the_release_are_never_called(losses):
    """Its __init__ raises first; they may stand before it."""
    text = """
        import transformer_engine as te
        class Fused(te.pytorch.Linear):
            def forward(self):
                return te.pytorch.Gone
            def __init__(self):
                super().__init__()
                if not is_te_min_version("{}"):
                    raise RuntimeError("too old")
    """
    assert losses(text.format("2.14")) == {}
    assert losses(text.format("2.4")) == {"Gone": ["extension: Fused.forward raises AttributeError"]}


def test_a_member_is_lost_with_its_class(losses):
    """One name for both."""
    assert set(losses("from transformer_engine.pytorch import Gone\ndef f():\n    Gone.apply()\n")) == {"Gone"}


def test_other_modules_that_import_what_is_lost_are_named(losses):
    """Through as many as pass it on, in whatever order they lie, in cycles too."""
    provider = """
        from megatron.core.user import something
        try:
            from transformer_engine.pytorch import Gone
            SplitAlongDim = Gone.apply
            def fused(x): return x
        except ImportError:
            SplitAlongDim = None
    """
    user = "from megatron.core.extension import SplitAlongDim  # transformer_engine\nsomething = 1\n"
    caught = """
        # transformer_engine
        try:
            from .extension import fused
        except ImportError:
            fused = None
    """
    found = losses(provider, user=user, aaa=caught, zzz=user.replace("core.extension", "core.user"))
    assert set(found) == {"Gone"}
    assert sorted(found["Gone"]) == [
        "aaa: fused=None",
        "extension: SplitAlongDim=None",
        "user: SplitAlongDim=None",
        "zzz: SplitAlongDim=None",
    ]


def test_hostile_sources_tell_nothing(losses):
    """What cannot be parsed, and expressions nested without end."""
    assert losses("from transformer_engine import (:\n") == {}
    assert losses("import transformer_engine\nx = " + "+".join(["1"] * 3000) + "\n") == {}


def test_releases_in_few_words():
    """Stretches of neighbours, and back."""
    order = ["2.1", "2.2", "2.3", "2.10", "2.11"]
    for chosen, text in ((["2.2"], "2.2"), (order, "2.1 - 2.11"), (["2.1", "2.2", "2.10"], "2.1 - 2.2, 2.10")):
        assert spans(chosen, order) == text and list(expanded(text, order)) == chosen


def test_measuring_gives_a_line_for_each_name_and_place(tmp_path):
    """Releases with the same share an entry, and those of Transformer Engine come in the order of their versions."""
    for release in ("0.16.0", "0.17.0"):
        text = "try:\n    from transformer_engine.m import a\nexcept ImportError:\n    a = None\n"
        megatron(tmp_path / release, release, {"x.py": text})
    for release, there in (("2.10.0", "b = 1\n"), ("2.9.0", "a = 1\n"), ("1.11.0", "")):
        write_file(tmp_path / release / "transformer_engine" / "__init__.py", "")
        write_file(tmp_path / release / "transformer_engine" / "m.py", there)
    megatrons = [(r, tmp_path / r) for r in ("0.16.0", "0.17.0")]
    found = measure_losses(megatrons, [(r, tmp_path / r) for r in ("1.11.0", "2.10.0", "2.9.0")])
    assert found["transformer-engine"] == ["1.11.0", "2.9.0", "2.10.0"]
    on = {"0.16.0 - 0.17.0": "1.11.0, 2.10.0"}
    name = "transformer_engine.m:a"
    assert found["losses"] == [{"name": name, "module": "megatron.core.x", "what": ["a=None"], "on": on}]
    assert json.loads(render_losses(found)) == found


def test_pairs_that_a_table_knows_are_not_measured_again(tmp_path):
    """One release more costs its own pairs; what a table says of the others stays, though nothing is there to read."""
    text = "try:\n    from transformer_engine.m import a\nexcept ImportError:\n    a = None\n"
    for release in ("0.16.0", "0.17.0"):
        megatron(tmp_path / release, release, {"x.py": text})
    for release, there in (("2.9.0", "a = 1\n"), ("2.10.0", "b = 1\n")):
        write_file(tmp_path / release / "transformer_engine" / "__init__.py", "")
        write_file(tmp_path / release / "transformer_engine" / "m.py", there)
    megatrons, engines = [[(r, tmp_path / r) for r in rs] for rs in (("0.16.0", "0.17.0"), ("2.9.0", "2.10.0"))]
    every = measure_losses(megatrons, engines)
    assert [loss["on"] for loss in every["losses"]] == [{"0.16.0 - 0.17.0": "2.10.0"}]
    nowhere = [("0.16.0", tmp_path / "gone"), megatrons[1]]
    assert measure_losses(nowhere, engines, before=measure_losses(megatrons[:1], engines)) == every
    assert measure_losses(megatrons[::-1], engines, before=every)["losses"][0]["on"] == {"0.17.0 - 0.16.0": "2.10.0"}
    # Only what cannot be read is taken from the table, where everything is measured anew.
    write_file(tmp_path / "2.9.0" / "transformer_engine" / "m.py", "b = 1\n")
    missing = [("2.9.0", tmp_path / "2.9.0"), ("2.10.0", tmp_path / "gone")]
    anew = measure_losses(megatrons, missing, before=every, kept=["2.10.0"])
    assert [loss["on"] for loss in anew["losses"]] == [{"0.16.0 - 0.17.0": "2.9.0 - 2.10.0"}]


# The tables that ship


def test_the_table_is_as_written_and_of_the_supported_releases():
    """After a change of releases: `make pins`."""
    assert FILE.read_text("utf-8") == render_losses(table())
    matrix = load_matrix()
    supported, commits = matrix.supported, matrix.commits[TE].values()
    assert table()[MEGATRON] == list(supported[MEGATRON])
    tagged = [commit.version for commit in commits if commit.tagged]
    assert table()[TE] == sorted([*MORE_TE, *tagged, *supported[TE]], key=Version) and tagged == ["2.0.0"]
    assert {loss["name"] for loss in table()["losses"]} <= set(wanted_names())


NAMES = {
    ("0.12.0", "2.20.2"): {"attention:FusedRoPEFunc", "attention:_SplitAlongDim"},
    ("0.16.1", "2.12.0"): {"attention:_SplitAlongDim", "module.base:get_workspace"},
    ("0.14.0", "2.1.0"): {"cross_entropy:parallel_cross_entropy", "module.base:get_dummy_wgrad"},
    ("0.17.1", "2.15.0"): {
        "attention:_SplitAlongDim",
        "fp8:FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
        "module.base:get_workspace",
    },
    ("0.19.2", "2.8.0"): {
        "../common.recipe:CustomRecipe",
        "attention:_SplitAlongDim",
        "ep:is_symm_backed",
        "ops.basic.grouped_linear:GRAD_INPUT_BUFFER_KEY",
        "ops.basic.grouped_linear:OUTPUT_BUFFER_KEY",
        "ops:GroupedLinear",
        "ops:ScaledClampedQGeGLU",
        "ops:ScaledSReLU",
        "ops:ScaledSwiGLU",
        "optimizers:multi_tensor_scale_tensor",
        "permutation:moe_permute_and_pad_with_probs",
        "tensor.grouped_tensor:GroupedTensor",
        "tensor.utils:post_all_gather_processing",
        "tensor.utils:quantize_master_weights",
        "../pytorch:ep",
    },
}


@pytest.mark.parametrize("pair", NAMES, ids="+".join)
def test_known_pairs(pair):
    """Read in both sources by hand."""
    prefixed = {
        f"transformer_engine.{name[3:]}" if name.startswith("../") else f"transformer_engine.pytorch.{name}"
        for name in NAMES[pair]
    }
    assert set(places(*map(Version, pair))) == prefixed


def test_known_effects():
    """One hop within megatron-core included."""
    found = places(Version("0.16.1"), Version("2.12.0"))
    assert found["transformer_engine.pytorch.attention:_SplitAlongDim"] == [
        "megatron.core.extensions.transformer_engine: SplitAlongDim=None",
        "megatron.core.transformer.attention: SplitAlongDim=None",
    ]
    assert found["transformer_engine.pytorch.module.base:get_workspace"] == [
        "megatron.core.extensions.transformer_engine: te_general_gemm=None",
        "megatron.core.transformer.moe.moe_utils: te_general_gemm=None",
    ]


def lost_pairs():
    """Every lost name with the releases of megatron-core that lose it somewhere."""
    found = {}
    for loss in table()["losses"]:
        for wanting in loss["on"]:
            found.setdefault(loss["name"], set()).update(expanded(wanting, table()[MEGATRON]))
    return found


def test_every_lost_name_is_judged_and_no_judgement_is_superfluous():
    """Each case of a name holds for some release that loses it."""
    lost = lost_pairs()
    assert list(remedies()["names"]) == sorted(lost)
    for name, releases in lost.items():
        met = [remedy_for(name, Version(release)) for release in releases]
        assert all(met), name
        assert all(case in met for case in remedies()["names"][name]), name


def test_judgements_are_well_formed():
    """A remedy of four, a sentence without a full stop, and a patch that is there."""
    ids = set(load_matrix().patches)
    for case in [case for cases in remedies()["names"].values() for case in cases] + remedies()["drifts"]:
        assert case["remedy"] in ("alias", "adapter", "none", "unneeded")
        assert case["lost"] and not case["lost"].endswith(".") and "|" not in case["lost"]
        assert case.get("patch", "te-moved-symbols") in ids
        assert case["remedy"] in ("alias", "adapter") or "patch" not in case
        assert case["remedy"] != "alias" or "patch" in case


def test_drifts_are_of_supported_releases():
    """What is there in another shape is known by versions alone."""
    for drift in remedies()["drifts"]:
        for distribution in (MEGATRON, TE):
            ranges = SpecifierSet(drift[distribution])
            assert any(ranges.contains(release, prereleases=True) for release in table()[distribution])


# What is said of the installed pair

PATCH = """\
  te-moved-symbols:
    summary: names that moved
    kind: compat
    changes: nothing
    distribution: megatron-core
    module: trainer_patches.roll_fix
    variants:
      only:
        targets: ["megatron.core.roll:roll"]
    applies:
      - {megatron-core: ">=0.16.0.dev0,<0.19.0.dev0", variant: only}
    delete_when: upstream does so
"""


@pytest.fixture
def pair(world, monkeypatch):
    """Installs fake releases with these versions; the table that ships speaks of them."""

    def install(mine, other, text=None):
        world.install("def roll(): pass\n" if text is None else text, mine)
        write_file(world.site / "transformer_engine" / "__init__.py", "raise RuntimeError('imported')\n")
        write_file(world.site / "transformer_engine" / "pytorch.py", "class Linear: pass\n")
        metadata(world.site, other, "transformer-engine")
        monkeypatch.setenv("MEGATRON_SHIM_MATRIX", str(world.matrix))
        return world

    return install


def names_of(features):
    return [feature.name.rpartition(":")[2] for feature in features]


def test_the_plan_tells_what_is_lost_and_what_fixes_it(pair):
    """Fixed where the patch is applied; else why it is not."""
    world = pair("0.16.1", "2.12.0")
    before = world.plan()
    assert names_of(before.lost_features) == ["_SplitAlongDim", "get_workspace", "CPUOffloadEnabled"]
    assert before.pair_is_known is True and not any(feature.fixed for feature in before.lost_features)
    assert "te-moved-symbols would fix it, but the matrix does not have it" in before.text(verbose=True)
    world.install("def roll(): pass\n", "0.16.0")
    world.pin(MATRIX + PATCH)
    world.on_path(world.site, world.own)
    (world.site / "megatron/core/roll.py").write_text(
        (world.root / "releases/0.16.0/megatron/core/roll.py").read_text()
    )
    fixed = world.plan()
    assert [feature.fixed for feature in fixed.lost_features] == [True, True, False]
    whole = fixed.text(verbose=True)
    assert "  fixed         transformer_engine.pytorch.attention:_SplitAlongDim: query" in whole
    assert "; fixed by te-moved-symbols" in whole
    assert "features lost with this TE: 2 fixed, 1 lost (-v)" in str(fixed)  # which fits a screen
    excluded = world.plan(exclude="te-moved-symbols").lost_features[0]
    assert excluded.outcome.startswith("te-moved-symbols would fix it, but it is excluded: excluded by argument")


def test_what_cannot_be_had_comes_with_a_later_release(pair):
    """Or with none; what needs no fixing is left out."""
    found = {feature.name.rpartition(":")[2]: feature for feature in pair("0.19.2", "2.8.0").plan().lost_features}
    assert found["GroupedLinear"].outcome == "cannot be had with this release, comes with Transformer Engine 2.13.0"
    assert found["GroupedTensor"].outcome == "cannot be had with this release, comes with Transformer Engine 2.14.0"
    assert "get_workspace" not in names_of(pair("0.19.2", "2.20.2").plan().lost_features)


def test_a_drift_is_told_by_versions(pair):
    """megatron-core 0.17 passes an option that Transformer Engine has from 2.10 on."""
    assert "get_cpu_offload_context" in names_of(pair("0.17.0", "2.9.0").plan().lost_features)


@pytest.mark.parametrize("versions", [("0.16.0", "2.12.0+cu12"), ("0.16.0+local", "2.12.0"), ("0.16", "2.12")])
def test_local_parts_and_missing_zeros_do_not_matter(pair, versions):
    """The public version is what was measured."""
    world = pair("0.16.0", versions[1])
    metadata(world.site, versions[0])
    assert names_of(world.plan().lost_features)[0] == "_SplitAlongDim"


@pytest.mark.parametrize(("other", "named"), [("2.13.0", True), ("2.12.0", False)])
def test_the_plan_names_what_two_releases_get_wrong_together(pair, other, named):
    """By the matrix, where the patch is applied; it decides about no variant."""
    wrong = '    pairs:\n      - {megatron-core: "<0.17", transformer-engine: ">=2.13", note: norms lack experts}\n'
    world = pair("0.16.0", other)
    world.pin(MATRIX + PATCH + wrong)
    world.on_path(world.site, world.own)
    (world.site / "megatron/core/roll.py").write_text(
        (world.root / "releases/0.16.0/megatron/core/roll.py").read_text()
    )
    plan = world.plan()
    assert plan["te-moved-symbols"].wanted
    assert plan.wrong_pairs == ((("te-moved-symbols", "norms lack experts"),) if named else ())
    assert plan.to_dict()["wrong_pairs"] == [{"patch": id, "what": what} for id, what in plan.wrong_pairs]
    assert ("1 defect of the pair" in str(plan)) is named is ("norms lack experts" in plan.text(verbose=True))
    assert world.plan(exclude="te-moved-symbols").wrong_pairs == ()


def test_nothing_is_said_where_one_is_not_installed(world):
    """Neither in text nor otherwise."""
    plan = world.install("def roll(): pass\n", "0.16.1").plan()
    assert (plan.lost_features, plan.pair_is_known) == ((), None)
    assert "does not get" not in str(plan) and "not measured" not in str(plan)


def test_an_unknown_pair_is_said_to_be_unknown_and_doctor_looks_through_it(pair, capsys):
    """The plan must not take a second; names that nobody judged are told as they are."""
    world = pair("0.16.1", "2.99.0")
    guarded = "try:\n    from transformer_engine.pytorch import Gone\nexcept ImportError:\n    Gone = None\n"
    write_file(world.site / "megatron/core/guarded.py", guarded)
    plan = world.plan()
    assert (plan.lost_features, plan.pair_is_known) == ((), False)
    assert "Lost features of this pair of releases were not measured" in str(plan)
    main(["doctor", "--json"])
    lost = json.loads(capsys.readouterr().out)["lost_features"]
    assert [(item["name"], item["remedy"], item["lost"]) for item in lost][:1] == [
        ("transformer_engine.pytorch:Gone", "", "megatron.core.guarded imports it")
    ]
    assert lost[0]["outcome"] == "not fixed"


def test_doctor_lists_it(pair, capsys):
    """As Markdown, like the rest."""
    pair("0.16.1", "2.12.0")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "Features that this megatron-core does not get from this Transformer Engine:" in out
    assert "- `transformer_engine.pytorch.attention:_SplitAlongDim`: query, key and value are split" in out


def test_the_digest_does_not_know_of_it(pair, monkeypatch):
    """Ranks compare what is applied."""
    world = pair("0.16.1", "2.12.0")
    digest = world.plan().digest
    monkeypatch.setattr(_features, "places", lambda *_: {})
    assert world.plan().digest == digest


def test_the_page_names_all_that_is_lost():
    """Every name, every drift, and what is missing without a loss."""
    text = Path(REPOSITORY, "docs", "transformer-engine.md").read_text("utf-8")
    for name in lost_pairs():
        assert f"| `{name.removeprefix('transformer_engine.')}` |" in text
    assert "- `pytorch.ops:SiLU`" in text and "- `pytorch.ep:EpBuffer`" not in text
    assert " - 2.20.2 | nothing: general_gemm is called without a workspace" in text

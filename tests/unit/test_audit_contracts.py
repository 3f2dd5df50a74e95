"""What an audit says of contracts: kept or broken, what they ask for, and that a body without one must be known."""

import json

import pytest
from audit_cases import EDITED, check_markdown, examiner, verdicts_of
from unit_helpers import BROKEN, MATRIX

from shim._matrix.model import Needs
from shim._tools.audit_contracts import NONE, _asked
from shim._tools.audit_report import as_markdown, as_text

ROLL, FORWARD, HELPER = (f"megatron.core.roll:{name}" for name in ("roll", "Layer.forward", "helper"))
CONTRACTS = MATRIX.replace(
    "    delete_when: megatron-core 0.17",
    f"""    contracts:
      - {{target: "{ROLL}", parameters: [x, shift], exact: true, also: [dims], has: ["helper(x)"]}}
    delete_when: megatron-core 0.17""",
)


@pytest.fixture
def verdicts(world, tmp_path):
    world.pin(CONTRACTS)
    return verdicts_of(examiner(world), tmp_path)


def test_a_body_that_keeps_its_contract_applies_and_is_listed(verdicts):
    """One line in the text; Markdown and JSON have the diff and what was asked for."""
    found = verdicts(EDITED)["roll-fix"]
    assert found.verdict == "apply" and verdicts.audit.clean
    [difference] = found.differences
    assert (difference.target, difference.nearest) == (ROLL, "0.16.0")
    assert difference.contract == "kept: it takes x, shift and nothing else, at most dims more; it has `helper(x)`"
    assert difference.diff[-1] == "+    return helper(x) + 1"
    text, markdown = as_text(verdicts.audit), as_markdown(verdicts.audit)
    assert f"binds {ROLL}: its body is not that of any pinned release (from 0.16.0); contract kept\n" in text
    assert "+    return helper(x) + 1" not in text
    check_markdown(markdown)
    assert "+    return helper(x) + 1" in markdown and "; contract kept: it takes x, shift" in markdown
    patch = json.loads(json.dumps(verdicts.audit.to_dict()))["patches"]["roll-fix"]
    assert patch["differences"][0]["contract"] == difference.contract


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (BROKEN.replace("return helper(x)", "return x"), "it lacks `helper(x)`"),
        (BROKEN.replace("shift=-1", "shift=-1, more=1"), "it has a parameter more: 'more'"),
    ],
)
def test_a_broken_contract_is_said_once(verdicts, text, broken):
    """Beside the reason why the body is not known, and with the diff."""
    found = verdicts(text)["roll-fix"]
    assert found.verdict == "drifted" and broken in found.reason
    [difference] = found.differences
    assert (difference.why, difference.contract) == ("its body is not that of any pinned release", f"broken: {broken}")
    said = as_text(verdicts.audit)
    assert f"(from 0.16.0); contract broken: {broken}\n" in said and "      +" in said


def test_a_body_without_a_contract_must_be_known(verdicts):
    """And the one that keeps its contract beside it is listed, too."""
    found = verdicts(EDITED.replace("return x\n", "return x * 2\n", 1))["roll-fix"]
    assert found.verdict == "drifted"
    contracts = {difference.target: difference.contract for difference in found.differences}
    assert list(contracts) == [ROLL, HELPER]
    assert contracts[HELPER] == NONE and contracts[ROLL].startswith("kept: ")


def test_of_a_body_that_cannot_be_read_no_contract_is_judged(verdicts):
    """Its reason says all there is to say."""
    found = verdicts(BROKEN.replace("def roll(", "def rolls("))["roll-fix"]
    assert found.verdict == "gone"
    assert [(d.why, d.contract) for d in found.differences] == [("megatron.core.roll has no roll", "")]


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(parameters=("x", "**kwargs"), first=("self", "x")), ["takes self, x, **kwargs"]),
        (Needs(exact=True), ["takes nothing"]),
        (Needs(decorators=("staticmethod",), returns=("(_, _)",)), ["has `@staticmethod`", "returns only `(_, _)`"]),
        (Needs(has=("a +\n  b",), lacks=("c()", "d")), ["has `a + b`", "lacks `c()`, `d`"]),
        (
            Needs(has=("a(x)",), keeps=("x",), confined=("x",)),
            ["has `a(x)`", "binds nothing else to `x`", "uses `x` there alone"],
        ),
        (Needs(has=("x" * 300,)), [f"has `{'x' * 100}...`"]),
    ],
)
def test_every_term_of_a_contract_has_words(needs, said):
    """Long phrases are cut."""
    assert list(_asked(needs)) == said

"""Contracts: what a patch needs of a body that nobody has seen decides whether it is applied."""

import pytest
from unit_helpers import BROKEN

from shim._errors import MatrixError

CONTRACTS = """\
    contracts:
      - {target: "megatron.core.roll:roll", variants: [old],
         parameters: [x, shift], has: ["helper(x)"], lacks: ["fix(...)"], returns: ["_"]}
      - {target: "megatron.core.roll:Layer.forward", first: [self, x], has: ["return roll(x)"]}
      - {target: "megatron.core.roll:helper", parameters: [x], exact: true, returns: [x]}
    delete_when:"""
HELPER = '      - {target: "megatron.core.roll:helper", parameters: [x], exact: true, returns: [x]}'
EDITED = BROKEN.replace("return helper(x)", "print(x)\n        return helper(x)")


@pytest.fixture
def contracted(world):
    """The world of the matching tests, with contracts for the variant `old`."""
    text = world.matrix.read_text()
    world.matrix.write_text(text.replace("    delete_when:", CONTRACTS, 1))
    return world


def decision(world, text, version="0.16.0", **arguments):
    world.install(text, version)
    return world.plan(**arguments)["roll-fix"]


def test_an_unknown_body_that_keeps_its_contract_is_applied_and_said_so(contracted):
    found = decision(contracted, EDITED)
    assert (found.action, found.variant) == ("apply", "old")
    assert "body unknown, contract holds: roll; the other 2 bodies are known" in found.reason


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def roll(x, shift=-1)", "def roll(y, shift=-1)", "it has no parameter 'x'"),
        ("return helper(x)\n\n    class", "return x\n\n    class", "it lacks `helper(x)`"),
        ("return helper(x)\n", "fix(x)\n        return helper(x)\n", "it has `fix(...)`"),
        ("return helper(x)\n", "helper(x)\n", "it returns nothing"),
        ("def forward(self, x)", "def forward(self, scale, x)", "its parameters do not begin with self, x"),
        ("def helper(x):", "def helper(x, y=1):", "it has a parameter more: 'y'"),
        ("def helper(x):", "def helper(x, **more):", "it has a parameter more: 'more'"),
        ("        return x\n", "        return -x\n", "it returns -x"),
        ("def helper(x):", "@compiled\n    def helper(x):", "it has a decorator more: compiled"),
        ("def helper(x):", "async def helper(x):", "it is a coroutine"),
    ],
)
def test_a_broken_contract_is_drifted_and_named(contracted, old, new, said):
    assert old in EDITED
    found = decision(contracted, EDITED.replace(old, new, 1))
    assert found.action == "drifted" and f"breaks its contract: {said}" in found.reason
    assert "shim audit" in found.remedy


def test_known_bodies_only_can_be_asked_for(contracted):
    found = decision(contracted, EDITED, on_drift="known")
    assert found.action == "drifted" and "on_drift='known'" in found.reason and "on_drift='skip'" in found.remedy
    assert decision(contracted, BROKEN, on_drift="known").action == "apply"


def test_a_body_without_a_contract_must_be_known(contracted):
    text = contracted.matrix.read_text()
    contracted.matrix.write_text(text.replace("parameters: [x], exact: true, returns: [x]", "first: [x]"))
    edited = BROKEN.replace("        return x\n", "        return +x\n", 1)
    assert decision(contracted, edited).action == "apply"
    contracted.matrix.write_text(text.replace(HELPER, ""))
    found = decision(contracted, edited)
    assert found.action == "drifted" and "not that of any pinned release" in found.reason


@pytest.mark.parametrize("version", ["0.17.0", "0.19.0", None])
def test_the_nearest_variant_is_the_one_with_the_fewest_broken_bodies(contracted, version):
    """Variant `new` has no contract, so its body must be known; the version names `new`, or nothing."""
    found = decision(contracted, EDITED, version)
    assert (found.action, found.variant) == ("apply", "old")


def test_a_fix_of_another_kind_is_upstream(contracted):
    text = contracted.matrix.read_text()
    fixed = """    fixed:
      - {target: "megatron.core.roll:helper", has: ["fix(...)"], note: "helper fixes"}
    delete_when:"""
    contracted.matrix.write_text(text.replace("    delete_when:", fixed, 1))
    found = decision(contracted, BROKEN.replace("return x\n", "return fix(x)\n", 1))
    assert (
        found.action == "upstream"
        and "has fixed this itself: helper fixes (seen at megatron.core.roll:helper)" in found.reason
    )
    assert decision(contracted, BROKEN).action == "apply"


@pytest.mark.parametrize(
    ("contract", "said"),
    [
        ("", "is empty"),
        (', has: ["a b"]', "is not Python"),
        (', has: ["a = 1; b = 2"]', "one expression or one statement"),
        (", has: []", "has is empty"),
        (", calls: [x]", "unknown key 'calls'"),
        (", exact: 1", "must be true or false"),
        (", variants: [none-such], exact: true", "is no body of variant none-such"),
    ],
)
def test_a_contract_that_means_nothing_is_an_error_with_its_line(contracted, contract, said):
    text = contracted.matrix.read_text()
    contracted.matrix.write_text(text.replace(", parameters: [x], exact: true, returns: [x]", contract))
    with pytest.raises(MatrixError, match=said) as raised:
        contracted.plan()
    assert f"{contracted.matrix}:" in str(raised.value)


def test_a_body_has_one_contract_in_each_variant(contracted):
    text = contracted.matrix.read_text()
    contracted.matrix.write_text(text.replace(HELPER, HELPER + "\n" + HELPER))
    with pytest.raises(MatrixError, match="has two contracts in variant old"):
        contracted.plan()

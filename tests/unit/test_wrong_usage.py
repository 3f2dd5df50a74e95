"""What argparse refuses: exit 2, with the usage of the command."""

import pytest

from shim._tools.cli import main


@pytest.mark.parametrize(
    "arguments", [["gone"], ["plan", "--gone"], ["explain"], ["audit"], ["plan", "--on-drift", "known"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    """argparse says how it is used."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: shim" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--fr", "mtp"], "did you mean '--for'?"),
        (["plan", "--onl=p"], "did you mean '--only'"),  # no abbreviation
        (["explain", "p", "q"], "shim explain: error: unrecognized arguments: q"),
    ],
)
def test_what_a_command_does_not_know_is_said_by_the_command(arguments, said, capsys):
    """With its own usage, and the option that may have been meant."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    err = " ".join(capsys.readouterr().err.split())
    assert caught.value.code == 2
    assert f"usage: shim {arguments[0]}" in err and said in err

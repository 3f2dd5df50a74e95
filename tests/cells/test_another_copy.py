"""The release that is imported is the one that shim patches, whatever sys.path held at apply(). Real releases."""

import json
import os

import fork_server
import pytest

import shim
from shim import testing
from shim.testing import EVERYDAY
from shim.testing.releases import fetch

CELLS = {"0.19.2": "all"}

PLAN = shim.plan()
HERE = os.path.dirname(os.path.dirname(PLAN.environment.installed["megatron-core"].location))
OTHER = EVERYDAY[0] if testing.release() != EVERYDAY[0] else EVERYDAY[-1]

STORY = """
import json, logging, sys
told, parsed = [], []
sys.addaudithook(lambda event, given: event == "compile" and given[1] == "<unknown>" and parsed.append(len(given[0])))
class Keep(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("shim").addHandler(Keep())
HERE, OTHER = {here!r}, {other!r}
sys.path = [entry for entry in sys.path if entry != HERE]
meta_path = list(sys.meta_path)
{before}
import shim
shim.apply({demands})
{after}
import megatron.core.models.gpt.gpt_model
report = shim.status()
about = [text for text in told if "plan is made anew" in text]
states = {{id: report[id].state for id in report}}
print(json.dumps([report.digest, report.releases.get("megatron-core"), about, states, parsed]))
"""


def run(before="", after="", demands=""):
    story = STORY.format(here=HERE, other=str(fetch(OTHER)), before=before, after=after, demands=demands)
    done = fork_server.run(story, share_loaded=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain():
    digest, release, about, states, parsed = run(before="sys.path[:0] = [HERE]")
    assert (digest, about) == (PLAN.digest, [])
    # The tree of one file of upstream's took a tenth of the time of these imports. torch parses functions of its own.
    assert [size for size in parsed if size > 20_000] == []
    assert "applied" in states.values() and "conflict" not in states.values()
    return digest, release, states


def test_a_tree_that_a_launcher_appends_late_is_patched(plain):
    """As if it had been there at apply(), under strict too, and told once."""
    *found, about, states, _ = run(after="sys.path += [HERE]", demands="strict=True")
    assert (*found, states) == plain
    assert len(about) == 1 and HERE in about[0]


def test_another_release_that_comes_first_is_patched_as_itself(plain):
    """One message, and no conflict about a function that is upstream's own."""
    *found, about, states, _ = run(before="sys.path[:0] = [OTHER]", after="sys.path[:0] = [HERE]")
    assert (*found, states) == plain
    assert len(about) == 1 and HERE in about[0] and str(fetch(OTHER)) in about[0]

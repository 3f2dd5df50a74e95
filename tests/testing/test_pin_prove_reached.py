"""`shim pin --prove` on releases that train a part only if they are asked in a way of their own.

"Right on stock" and "fixed" are said of bodies that a proof has run, and of no others.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import in_full

from shim.testing import environment, fetch
from shim.testing.patience import patience
from shim.testing.releases import FetchError

REPOSITORY = Path(__file__).resolve().parents[2]

MTP, GPT, FINALIZE = (
    f"megatron/core/{name}.py"
    for name in ("transformer/multi_token_prediction", "models/gpt/gpt_model", "distributed/finalize_model_grads")
)


def edited(release, place, edits):
    """A copy of the release with the edits: of a file, each old text to a new one."""
    try:
        shutil.copytree(fetch(release) / "megatron", place / "megatron")
    except FetchError as error:
        pytest.skip(f"megatron-core {release} is not at hand: {error}")
    for name, old, new in edits:
        text = (place / name).read_text()
        assert text.count(old) == 1, (name, old)
        (place / name).write_text(text.replace(old, new))
    return place


def prove(tree, ids, place):
    """The verdicts of the proofs by patch, and what the command printed."""
    command = [sys.executable, "-m", "shim", "pin", "--prove", "--lock", "shim.lock", "--only", ids]
    command += ["--timeout", f"{patience():.0f}"]
    where = {"cwd": place, "env": environment([tree, REPOSITORY])}
    done = subprocess.run(command, capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stderr
    return json.loads((place / "shim.lock").read_text())["proved"]["patches"], done.stdout


def asking(name):
    """Edits after which 0.16.1 runs multi-token prediction only if it gets the argument `name`."""
    return [
        (GPT, "        *,\n", f"        *,\n        {name}=None,\n"),
        (GPT, "            loss_mask=loss_mask,\n", f"            loss_mask=loss_mask,\n            {name}={name},\n"),
        (GPT, "        loss_mask=None,\n", f"        loss_mask=None,\n        {name}=None,\n"),
        (GPT, "if mtp_in_postprocess:", f"if mtp_in_postprocess and {name}:"),
        (GPT, "if self.config.mtp_num_layers is not None:", f"if self.config.mtp_num_layers and {name}:"),
        # The defect as it was, in bodies that no release has.
        (MTP, "elif self.config.recompute_method == 'block':", "elif self.config.recompute_method in ('block',):"),
        (MTP, "        decoder_input = embedding(", "        decoder_input = embedding(*(), "),
    ]


def taking_tokens():
    """Edits after which it gets tokens in `mtp_kwargs`, which are not moved by one as labels are, and no labels."""
    packed = "shifts=-1, dims=-1, cp_group=self.cp_group, packed_seq_params=packed_seq_params"
    moved = f"            mtp_labels, _ = roll_tensor(mtp_labels, {packed})\n"
    moved += f"            loss_mask, _ = roll_tensor(loss_mask, {packed})\n"
    taken = "            assert labels is None\n            mtp_labels = mtp_kwargs['mtp_labels']\n"
    loop = "            for mtp_layer_number in range(self.config.mtp_num_layers):\n                # output\n"
    return [
        *asking("mtp_kwargs"),
        (GPT, "            mtp_labels = labels.clone()\n", taken),
        (GPT, loop, moved + loop),
    ]


BOTH = "mtp-recompute,mtp-full-embeddings"
BESIDE = ",mtp-gather-gradient"  # a proof of the second asks for it


@in_full
def test_a_tree_that_wants_tokens_for_multi_token_prediction_gets_them(tmp_path):
    """As slime's and miles' images do, whose trainers give a model no labels and compute the main loss themselves.

    The truth of packed rows is moved with them, and so are counts of targets.
    """
    ids = BOTH + ",mtp-packed-sequences,mtp-loss-cp"
    found, _ = prove(edited("0.16.1", tmp_path / "tree", taking_tokens()), ids + BESIDE, tmp_path)
    assert {id: said["verdict"] for id, said in found.items()} == dict.fromkeys(ids.split(","), "fixed")
    assert "MTP layers keep 11.8 times their inputs -> MTP layers keep 1.0 times" in found["mtp-recompute"]["shown"]


def test_a_tree_that_trains_it_in_another_way_is_not_said_to_be_right(tmp_path):
    found, _ = prove(edited("0.16.1", tmp_path / "tree", asking("draft_targets")), BOTH + BESIDE, tmp_path)
    assert {id: said["verdict"] for id, said in found.items()} == dict.fromkeys(BOTH.split(","), "cannot run")
    assert "does not run its layers of multi-token prediction" in found["mtp-recompute"]["shown"]
    assert found["mtp-full-embeddings"]["shown"].endswith("proofs do not run MultiTokenPredictionLayer._get_embeddings")


@in_full
def test_known_bodies_that_no_proof_runs_do_not_speak_against_the_matrix(tmp_path):
    edits = [edit for edit in asking("draft_targets") if edit[0] == GPT]
    found, out = prove(edited("0.16.1", tmp_path / "tree", edits), "mtp-full-embeddings" + BESIDE, tmp_path)
    assert found == {} and "speak against the matrix" not in out


@in_full
def test_a_fix_of_one_of_two_updates_is_no_fix(tmp_path):
    """The other is not called here, so its proof sees a bias that stays."""
    edits = [
        (
            FINALIZE,
            "                and not getattr(module, 'frozen_expert_bias', False)\n",
            "                and not getattr(module, 'frozen_expert_bias', False)\n"
            "                and any(weight.requires_grad for weight in module.parameters())\n",
        ),
        (
            FINALIZE,
            "        _update_router_qb_beta(model, config, dp_cp_group=dp_cp_group)\n",
            "        pass  # the trainer calls it\n",
        ),
    ]
    found, _ = prove(edited("0.19.2", tmp_path / "tree", edits), "frozen-expert-bias", tmp_path)
    [said] = found.values()
    assert said["verdict"] == "cannot run"
    assert said["shown"].endswith("but its proofs do not run _update_router_qb_beta")

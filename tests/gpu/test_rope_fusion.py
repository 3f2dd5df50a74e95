"""Real fused rotations on a GPU: with rope-fusion no call gives anything but the unfused result.

Nothing of Transformer Engine or megatron-core is imported before a test runs, so that this file is collected anywhere.
"""

import pytest
import torch

import shim
from shim.patches.megatron_core._proof_rotations import config_of, on_rank
from shim.patches.megatron_core.rope_fusion.proof import ASKED, FORMS, call_of, error_of
from shim.testing.proof import CannotRunError

pytestmark = pytest.mark.gpu

ID, ROWS = "rope-fusion", "rope-thd"


@pytest.fixture
def applied():
    with shim.patched(only=[ID, ROWS], require=[ID]) as report:
        if report[ID].state == "out-of-range":
            pytest.skip(report[ID].reason)
        yield


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize("form", FORMS)
def test_fused_and_unfused_agree(form, ask, ranks, applied):
    """On every rank, forward and backward; what differs is rounding."""
    for rank in range(ranks if form == "packed" else 1):
        try:
            assert error_of(form, ask, ranks if form == "packed" else 1, rank, "cuda") <= 1e-4
        except CannotRunError as error:
            pytest.skip(str(error))


def test_unfused_packed_rows_do_not_make_the_host_wait(applied):
    from megatron.core.models.common.embeddings import rope_utils

    with on_rank() as group:
        config, given = config_of("mscale"), call_of("packed", "mscale", device="cuda") | group
        rope_utils.apply_rotary_pos_emb(config=config, **given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            rope_utils.apply_rotary_pos_emb(config=config, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

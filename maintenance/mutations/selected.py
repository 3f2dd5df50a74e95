"""For each patch: what stock has to do right on a mutant, and which tests tell whether the patch is right on it.

The tests are few and quick, with one at least for each function that the patch binds. Tests that show what is wrong on
stock are left out: a mutant may fix it. A patch that is not named here has one file of quick tests, of its own name.
"""

__all__ = ["PROBES_OF", "folder_of", "tests_of"]

PROBES_OF = {
    "mtp-packed-sequences": ("mtp", "packed"),
    "mtp-recompute": ("mtp", "recompute", "checkpoints"),
    "fp8-fp4-recompute": ("recompute", "checkpoints", "fp8"),
    "frozen-recompute": ("recompute", "packed"),
    "rope-thd": ("rope", "packed"),
    "rope-fusion": ("rope", "packed"),
    "mla-rope-table": ("yarn",),
    "config-override": ("recompute", "checkpoints"),
    "paged-stash": ("moe", "stash"),
    "expert-bias-padding": ("bias",),
    "te-fp8-state": ("fp8",),
    "te-config-override": ("fp8",),
    "te-cpu-offload": ("packed", "fp8"),
}
# The releases that have upstream's own stash.
STASH_SINCE = (0, 18)

# Patch -> (folder, {file: words for pytest -k}).
TESTS = {
    "mtp-packed-sequences": (
        "cells",
        {
            "test_mtp_packed_sequences": "packed_equals_alone and 2-rope-all or really_recomputed"
            " or unpacked_rows_keep and False or full_recompute and block-2-lengths1"
            " or without_targets or newest_release or computed_once",
            "layouts/test_mtp_upstream_cases": "padding_mask or derives_labels or as_upstream_says",
        },
    ),
    "mtp-recompute": (
        "cells",
        {"test_mtp_recompute": "changes_no_bit and (lora or True) and not tensor_parallel or random_states"},
    ),
    "fp8-fp4-recompute": ("pairs", {"test_fp8_fp4_recompute": "patched and not stock or outside_of_any or exception"}),
    "frozen-recompute": ("cells", {"test_frozen_recompute": "not stock"}),
    "rope-thd": ("cells", {"test_rope_thd": "keep_every_bit and fp32 and not pieces or operations or group_is_asked"}),
    "rope-fusion": ("cells", {"test_rope_fusion": "such_a_call or model_trains or missing_kernel"}),
    "mla-rope-table": ("cells", {"test_mla_rope_table": "own_length"}),
    "config-override": (
        "cells",
        {"test_config_override": "holds_in or ran_outside or full_recompute or very_function"},
    ),
    "paged-stash": (
        "cells",
        {
            "test_paged_stash": "changes_no_bit and all or evaluation or an_overflow or spills or may_change",
            "test_paged_stash_manager": "not stock and (rerun or may_change or evaluation or does_not_fit or goes_on)",
        },
    ),
    "expert-bias-padding": ("cells", {"test_expert_bias_padding": "not stock_ and not raises"}),
    "te-fp8-state": ("pairs", {"test_te_fp8_state": "patched and not stock"}),
    "te-config-override": ("pairs", {"test_te_config_override": "holds"}),
    "te-cpu-offload": ("pairs", {"test_te_cpu_offload": "not stock"}),
}


def folder_of(id: str) -> str:
    """Of a patch's tests: "cells", or "pairs" where they need Transformer Engine."""
    return TESTS[id][0] if id in TESTS else "cells"


def tests_of(id: str) -> list[list[str]]:
    """Arguments of one run of pytest after another."""
    own = {f"test_{id.replace('-', '_')}": "not stock and not this_release"}
    files = TESTS[id][1] if id in TESTS else own
    return [[f"tests/{folder_of(id)}/{name}.py", "-k", words] for name, words in files.items()]

"""How a release could let an evaluation come before the first step, with its own stash."""

RELEASE = "0.19.2"
STASH = "megatron.core.transformer.moe.paged_stash:"
CHUNK, RESET, COUNT = (
    f"{STASH}paged_stash_init_chunk_handler",
    f"{STASH}paged_stash_reset",
    f"{STASH}PagedStashManager.update_model_chunk",
)
NUMBERS = "    stash_manager.current_vp_stage = vp_stage if vp_stage is not None else 0"
NONE = "stash_manager.current_layer, stash_manager.current_microbatch = (None, None)"

FIXES = {
    "counts no microbatch without a stash": {
        CHUNK: [(NUMBERS, NUMBERS + "\n    if not stash_manager.enabled:\n        return")]
    },
    "counts anew before it records": {
        RESET: [
            (
                "    if stash_manager.status == 'begin':",
                f"    if stash_manager.status in ('begin', 'capture'):\n        {NONE}\n    if stash_manager.status == 'begin':",
            )
        ]
    },
    "counts in the manager where it is enabled": {
        COUNT: [
            (
                "    self.current_layer[vp_stage_index] = 1",
                "    if not self.enabled:\n        return\n    self.current_layer[vp_stage_index] = 1",
            )
        ]
    },
}
PROOFS = {what: ["an-evaluation-may-come-before-the-first-step"] for what in FIXES}

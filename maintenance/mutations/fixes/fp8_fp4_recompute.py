"""How a release could recompute in the FP8 region of the forward pass."""

RELEASE = "0.19.2+2.20.2"
RANDOM = "megatron.core.tensor_parallel.random:"
FORWARD, BACKWARD = f"{RANDOM}CheckpointFunction.forward", f"{RANDOM}CheckpointFunction.backward"
CHECKPOINT, INIT = f"{RANDOM}checkpoint", f"{RANDOM}CheckpointWithoutOutput.__init__"
SAVE = "    ctx.run_function = run_function"
STATE = (
    "    ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled() if HAVE_TE else False\n"
    "    ctx.fp8_recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None\n"
)
FIRST = (
    "    with torch.no_grad():",
    "    with torch.no_grad(), (activation_recompute_forward(activation_recompute=True, recompute_phase=False) if ctx.fp8 else contextlib.nullcontext()):",
)
REGION = "fp8_autocast(enabled=ctx.fp8, fp8_recipe=ctx.fp8_recipe) if ctx.fp8 else contextlib.nullcontext()"
PHASE = "activation_recompute_forward(activation_recompute=True, recompute_phase=True) if ctx.fp8 else contextlib.nullcontext()"
RUN = "            outputs = ctx.run_function(*detached_inputs)"
FP8 = "self.fp8 = fp8 is not None"
REMEMBERED = (
    "    if HAVE_TE and FP8GlobalStateManager.is_fp8_enabled():\n"
    "        recipe, inner, phases = (FP8GlobalStateManager.get_fp8_recipe(), {0}, [False, True])\n"
    "        def {1}(*given):\n"
    "            phase = activation_recompute_forward(activation_recompute=True, recompute_phase=phases.pop(0))\n"
    "            with fp8_autocast(enabled=True, fp8_recipe=recipe), phase:\n"
    "                return inner(*given)\n"
)

FIXES = {
    "enters the region around the function": {
        FORWARD: [(SAVE, STATE + SAVE), FIRST],
        BACKWARD: [
            (
                RUN,
                f"            with ({REGION}), ({PHASE}):\n                outputs = ctx.run_function(*detached_inputs)",
            )
        ],
    },
    "enters the region with gradients": {
        FORWARD: [(SAVE, STATE + SAVE), FIRST],
        BACKWARD: [("with torch.enable_grad():", f"with torch.enable_grad(), ({REGION}), ({PHASE}):")],
    },
    "enters the region around all": {
        FORWARD: [(SAVE, STATE + SAVE), FIRST],
        BACKWARD: [("    with _fork_rng():", f"    with _fork_rng(), ({REGION}), ({PHASE}):")],
    },
    "gives the checkpoint a function with the region": {
        CHECKPOINT: [
            (
                "    return CheckpointFunction.apply",
                REMEMBERED.format("function", "in_region")
                + "        function = in_region\n    return CheckpointFunction.apply",
            )
        ],
    },
    "keeps a function with the region": {
        FORWARD: [
            (SAVE, REMEMBERED.format("run_function", "in_region") + "        run_function = in_region\n" + SAVE),
        ],
    },
    "asks for Transformer Engine": {INIT: [(FP8, "self.fp8 = HAVE_TE and fp8 is not None")]},
    "asks whether a region is entered": {INIT: [(FP8, "self.fp8 = bool(HAVE_TE and fp8)")]},
    "forgets it behind": {
        INIT: [("    self.ctx = None", "    self.ctx = None\n    if not HAVE_TE:\n        self.fp8 = False")]
    },
}
QUANTIZED, WITHOUT = (
    ["a-recompute-is-quantized-as-its-forward-pass"],
    ["an-output-is-recomputed-without-transformer-engine"],
)
PROOFS = {what: WITHOUT if INIT in changed else QUANTIZED for what, changed in FIXES.items()}
# Without Transformer Engine, which the last proof is about.
RELEASES = {what: "0.19.2" for what, changed in FIXES.items() if INIT in changed}

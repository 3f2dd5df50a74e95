"""How a release could see the config of the forward pass in a recompute."""

RELEASE = "0.19.2"
RANDOM = "megatron.core.tensor_parallel.random:"
FORWARD, BACKWARD, CHECKPOINT = (
    f"{RANDOM}CheckpointFunction.forward",
    f"{RANDOM}CheckpointFunction.backward",
    f"{RANDOM}checkpoint",
)
SAVE = "    ctx.run_function = run_function"
RUN = "            outputs = ctx.run_function(*detached_inputs)"
# The config that a function of a block holds.
FIND = (
    "    found = [cell.cell_contents for cell in getattr({}, '__closure__', None) or ()]\n"
    "    found += [cell.cell_contents for f in found for cell in getattr(f, '__closure__', None) or ()]\n"
    "    configs = [value.config for value in found if hasattr(value, 'config')]\n"
)
SWAP = (
    "            then = [(config, dict(vars(config))) for config, _ in ctx.configs]\n"
    "            for config, values in ctx.configs:\n"
    "                vars(config).update(values)\n"
    "            try:\n"
    "                outputs = ctx.run_function(*detached_inputs)\n"
    "            finally:\n"
    "                for config, values in then:\n"
    "                    vars(config).update(values)"
)
KEPT = FIND.format("run_function") + "    ctx.configs = [(config, dict(vars(config))) for config in configs]\n"
INSIDE = (
    "    kept, inner = ([(config, dict(vars(config))) for config in configs], {0})\n"
    "    def {1}(*given):\n"
    "        then = [(config, dict(vars(config))) for config, _ in kept]\n"
    "        for config, values in kept:\n"
    "            vars(config).update(values)\n"
    "        try:\n"
    "            return inner(*given)\n"
    "        finally:\n"
    "            for config, values in then:\n"
    "                vars(config).update(values)\n"
)

FIXES = {
    "keeps the values of the config beside the function": {FORWARD: [(SAVE, KEPT + SAVE)], BACKWARD: [(RUN, SWAP)]},
    "keeps another function": {
        FORWARD: [
            (
                SAVE,
                SAVE
                + "\n"
                + FIND.format("run_function")
                + INSIDE.format("run_function", "in_config")
                + "    ctx.run_function = in_config",
            )
        ]
    },
    "gives the checkpoint another function": {
        CHECKPOINT: [
            (
                "    return CheckpointFunction.apply",
                FIND.format("function")
                + INSIDE.format("function", "function_in_config")
                + "    function = function_in_config\n    return CheckpointFunction.apply",
            )
        ]
    },
}

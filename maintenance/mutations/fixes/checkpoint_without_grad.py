"""How a release could leave recomputed outputs without a gradient out of backward."""

RELEASE = "0.19.2"
RANDOM = "megatron.core.tensor_parallel.random:"
BACKWARD, WITHOUT = f"{RANDOM}CheckpointFunction.backward", f"{RANDOM}CheckpointWithoutOutputFunction.backward"
ZIP = "    outputs, args = zip("
RUN = "    torch.autograd.backward(outputs, args)"
PICK = "[(o, g) for o, g in zip(outputs, args) if torch.is_tensor(o) and o.requires_grad]"
FIRST = [
    (
        "    outputs, args = zip(",
        f"    pairs = {PICK}\n    outputs, args = ([o for o, _ in pairs], [g for _, g in pairs])\n    _ = lambda: zip(",
    ),
    (RUN, "    if outputs:\n        torch.autograd.backward(outputs, args)"),
]

FIXES = {
    "runs where something is left": {
        BACKWARD: FIRST,
        WITHOUT: [
            (
                RUN,
                f"    pairs = {PICK}\n    if pairs:\n        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])",
            )
        ],
    },
    "asks before, and leaves": {
        BACKWARD: [
            (
                ZIP,
                "    if not any((torch.is_tensor(o) and o.requires_grad for o in outputs)):\n        _unset_checkpointing()\n"
                "        return (None, None) + tuple((None for _ in detached_inputs))\n" + ZIP,
            )
        ],
        WITHOUT: [
            (
                RUN,
                "    for output, gradient in zip(outputs, args):\n        if output.requires_grad:\n            torch.autograd.backward(output, gradient, retain_graph=True)",
            )
        ],
    },
    "sums what requires a gradient": {
        BACKWARD: [
            (
                ZIP,
                "    kept = [(o, g) for o, g in zip(outputs, args) if torch.is_tensor(o) and o.requires_grad] or [(torch.zeros((), requires_grad=True), torch.zeros(()))]\n    outputs, args = zip(*kept)\n    _ = lambda: zip(",
            ),
        ],
        WITHOUT: [
            (
                "    outputs = ctx.outputs",
                "    outputs = ctx.outputs\n    args = tuple((g for o, g in zip(outputs, args) if o.requires_grad))\n    outputs = tuple((o for o in outputs if o.requires_grad))",
            )
        ],
    },
}

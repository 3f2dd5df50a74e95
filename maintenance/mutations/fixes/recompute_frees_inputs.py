"""How a release could let the inputs of a recompute go."""

RELEASE = "0.19.2"
BACKWARD = "megatron.core.tensor_parallel.random:CheckpointFunction.backward"
RETURN = "    _unset_checkpointing()"
GRADS = "    grads = tuple("
DETACH = "        detached_inputs = detach_variable(inputs)"
RUN = "            outputs = ctx.run_function(*detached_inputs)"
IS = "isinstance(inp, torch.Tensor) and inp.requires_grad"

FIXES = {
    "empties the inputs behind": {
        BACKWARD: [
            (
                RETURN,
                f"    for inp in detached_inputs:\n        if {IS}:\n            inp.grad = None\n            inp.data = torch.empty(0, dtype=inp.dtype, device=inp.device)\n"
                + RETURN,
            )
        ]
    },
    "resizes their storage": {
        BACKWARD: [
            (
                RETURN,
                f"    for inp in detached_inputs:\n        if {IS}:\n            inp.grad = None\n            inp.set_(inp.new_empty(0))\n".replace(
                    "inp.set_(inp.new_empty(0))", "inp.data = inp.new_empty(0)"
                )
                + RETURN,
            )
        ]
    },
    "runs on copies in the graph": {
        BACKWARD: [
            (
                RUN,
                f"            outputs = ctx.run_function(*[inp.view_as(inp) if {IS} else inp for inp in detached_inputs])",
            ),
            (
                RETURN,
                f"    for inp in detached_inputs:\n        if {IS}:\n            inp.grad, inp.data = (None, inp.new_empty(0))\n"
                + RETURN,
            ),
        ]
    },
    "takes gradients by a function": {
        BACKWARD: [
            (
                GRADS,
                "    grads = tuple((inp.grad if isinstance(inp, torch.Tensor) else inp for inp in detached_inputs))\n"
                f"    while detached_inputs:\n        inp, *detached_inputs = detached_inputs\n        if {IS}:\n            inp.grad = None\n            inp.data = inp.data[:0].clone()\n"
                "    __tail = lambda detached_inputs: tuple(",
            )
        ]
    },
}

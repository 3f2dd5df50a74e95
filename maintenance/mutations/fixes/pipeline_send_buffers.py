"""How a release could keep the output of a stage until it is sent."""

RELEASE = "0.17.1"
OPS = "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops"
SEND = "torch.distributed.isend(tensor=tensor_send_next,"

FIXES = {
    "sends an alias": {OPS: [(SEND, SEND.replace("tensor_send_next,", "tensor_send_next.detach(),"))]},
    "sends a copy": {OPS: [(SEND, SEND.replace("tensor_send_next,", "tensor_send_next.clone(),"))]},
    "sends an alias of another name": {
        OPS: [
            (
                "    reqs = {}",
                "    reqs = {}\n    if tensor_send_next is not None:\n        tensor_send_next = tensor_send_next.view_as(tensor_send_next)",
            )
        ]
    },
    "waits for all sends before it frees": {
        OPS: [
            (
                "    return reqs",
                "    if 'send_next' in reqs:\n        deallocates = reqs['send_next']\n        getattr(deallocates, 'wait')()\n    return reqs",
            )
        ]
    },
}

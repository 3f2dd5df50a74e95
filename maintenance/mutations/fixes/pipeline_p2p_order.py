"""How a release could let two pipeline stages tell their two directions apart."""

RELEASE = "0.19.2"
MODULE = "megatron.core.pipeline_parallel.p2p_communication"
BATCH, SHAPES = f"{MODULE}:_batched_p2p_ops", f"{MODULE}:P2PCommunicator._communicate_shapes"
COMMUNICATE = f"{MODULE}:P2PCommunicator._communicate"


def swapped(indent, first, second, prev, next):
    return f"{indent}if {prev} == {next}:\n{indent}    {first}, {second} = ({second}, {first})\n"


def sorted_ops(indent, tensor, spelling):
    key = f"lambda op: op.op is torch.distributed.isend and op.tensor is {tensor}"
    done = {"in place": f"{indent}ops.sort(key={key})\n", "anew": f"{indent}ops = sorted(ops, key={key})\n"}
    return done[spelling]


BATCH_SENDS = [
    (
        "    ops = []",
        swapped("    ", "tensor_send_prev", "tensor_send_next", "prev_pipeline_rank", "next_pipeline_rank")
        + "    ops = []",
    )
]
SHAPE_SENDS = [
    (
        "    if config.use_ring_exchange_p2p:",
        swapped("    ", "send_prev_shape_tensor", "send_next_shape_tensor", "self.prev_rank", "self.next_rank")
        + "    if config.use_ring_exchange_p2p:",
    )
]

FIXES = {
    "swaps what is sent": {BATCH: BATCH_SENDS, SHAPES: SHAPE_SENDS},
    "swaps what is given": {
        BATCH: BATCH_SENDS,
        SHAPES: [
            (
                "    recv_prev_shape_tensor = None",
                swapped("    ", "tensor_send_prev", "tensor_send_next", "self.prev_rank", "self.next_rank")
                + "    recv_prev_shape_tensor = None",
            )
        ],
    },
    "sorts the operations": {
        BATCH: [("    if len(ops) > 0:", sorted_ops("    ", "tensor_send_prev", "in place") + "    if len(ops) > 0:")],
        SHAPES: [
            (
                "        if len(ops) > 0:",
                sorted_ops("        ", "send_prev_shape_tensor", "in place") + "        if len(ops) > 0:",
            )
        ],
    },
    "sorts the operations into a new list": {
        BATCH: [("    if len(ops) > 0:", sorted_ops("    ", "tensor_send_prev", "anew") + "    if len(ops) > 0:")],
        SHAPES: [
            (
                "        if len(ops) > 0:",
                sorted_ops("        ", "send_prev_shape_tensor", "anew") + "        if len(ops) > 0:",
            )
        ],
    },
    "sorts where it sends": {
        BATCH: [
            (
                "batch_isend_irecv(ops)",
                "batch_isend_irecv(sorted(ops, key=lambda op: op.op is torch.distributed.isend and op.tensor is tensor_send_prev))",
            )
        ],
        SHAPES: [
            (
                "batch_isend_irecv(ops)",
                "batch_isend_irecv(sorted(ops, key=lambda op: op.op is torch.distributed.isend and op.tensor is send_prev_shape_tensor))",
            )
        ],
    },
    "appends what goes to prev at the end": {
        BATCH: [
            ("        ops.append(send_prev_op)", "        last = [send_prev_op]"),
            ("    ops = []", "    ops, last = ([], [])"),
            ("    if len(ops) > 0:", "    ops += last\n    if len(ops) > 0:"),
        ],
        SHAPES: [
            ("            ops.append(send_prev_op)", "            last = [send_prev_op]"),
            ("        ops = []", "        ops, last = ([], [])"),
            ("        if len(ops) > 0:", "        ops.extend(last)\n        if len(ops) > 0:"),
        ],
    },
    "receives from next first": {
        BATCH: [
            ("    ops = []", "    ops = []\n    one_peer = prev_pipeline_rank == next_pipeline_rank"),
            (
                "        ops.append(recv_next_op)",
                "        ops.insert(1 if one_peer and tensor_recv_prev is not None and (tensor_send_prev is not None) else 0 if one_peer else len(ops), recv_next_op)",
            ),
        ],
        SHAPES: [
            ("        ops = []", "        ops = []\n        one_peer = self.prev_rank == self.next_rank"),
            (
                "            ops.append(recv_next_op)",
                "            ops.insert(1 if one_peer and recv_prev_shape_tensor is not None and (send_prev_shape_tensor is not None) else 0 if one_peer else len(ops), recv_next_op)",
            ),
        ],
    },
    "swaps where it calls": {
        COMMUNICATE: [
            (
                "    config = self.config",
                "    config, one_peer = (self.config, self.next_rank == self.prev_rank and self.config.batch_p2p_comm)",
            ),
            (
                "self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)",
                "self._communicate_shapes(*((tensor_send_prev, tensor_send_next) if self.next_rank == self.prev_rank else (tensor_send_next, tensor_send_prev)), recv_prev, recv_next)",
            ),
            (
                "p2p_func(tensor_send_prev=tensor_send_prev, tensor_recv_prev=tensor_recv_prev, tensor_send_next=tensor_send_next,",
                "p2p_func(tensor_send_prev=tensor_send_next if one_peer else tensor_send_prev, tensor_recv_prev=tensor_recv_prev, tensor_send_next=tensor_send_prev if one_peer else tensor_send_next,",
            ),
        ],
    },
    "sends one by one to one peer, and shapes sorted": {
        COMMUNICATE: [
            ("    elif config.batch_p2p_comm:", "    elif config.batch_p2p_comm and self.next_rank != self.prev_rank:"),
            (
                "    if isinstance(p2p_reqs, list):",
                "    if isinstance(reqs, list) and (not isinstance(p2p_reqs, list)):\n        p2p_reqs = list(p2p_reqs.values())\n    if isinstance(p2p_reqs, list):",
            ),
        ],
        SHAPES: [
            (
                "        if len(ops) > 0:",
                sorted_ops("        ", "send_prev_shape_tensor", "in place") + "        if len(ops) > 0:",
            )
        ],
    },
    "swaps what it has received": {
        COMMUNICATE: [
            (
                "    return (tensor_recv_prev, tensor_recv_next, reqs)",
                "    if config.batch_p2p_comm and recv_prev and recv_next and (self.next_rank == self.prev_rank):\n"
                "        tensor_recv_prev, tensor_recv_next = (tensor_recv_next, tensor_recv_prev)\n"
                "    return (tensor_recv_prev, tensor_recv_next, reqs)",
            )
        ]
    },
}
PROOFS = {"swaps what it has received": ["two-stages-exchange-what-they-are-to-exchange"]}

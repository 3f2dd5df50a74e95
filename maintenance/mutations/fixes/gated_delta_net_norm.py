"""How a release could sum the gradient of gated delta net's output norm itself."""

RELEASE = "0.19.2"
FINALIZE = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
CALLER = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
INIT = "megatron.core.ssm.gated_delta_net.common:_GDNBase.__init__"
NORM = "megatron.core.ssm.gated_delta_net.common:_GDNBase._apply_gated_norm"
QK = "config.qk_layernorm and ('q_layernorm' in name or 'k_layernorm' in name)"
SP = "config.sequence_parallel and getattr(param, 'sequence_parallel', False)"
MARKED = f"{SP} or getattr(param, 'sum_over_tp', False)"
AFTER = "    self.recompute_norm_out = False"

FIXES = {
    "asks for the name, as of the norms of queries and keys": {
        FINALIZE: [(QK, f"{QK} or name.endswith('out_norm.weight')")]
    },
    "asks for one of a list of names": {
        FINALIZE: [(QK, f"{QK} or any((part in name for part in ('gdn_norm', 'out_norm')))")]
    },
    "marks the weight by setattr": {
        FINALIZE: [(SP, MARKED)],
        INIT: [(AFTER, "    setattr(self.out_norm.weight, 'sum_over_tp', not config.sequence_parallel)\n" + AFTER)],
    },
    "marks all parameters of the norm": {
        FINALIZE: [(SP, MARKED)],
        INIT: [
            (
                AFTER,
                "    for weight in self.out_norm.parameters():\n        weight.sum_over_tp = not config.sequence_parallel\n"
                + AFTER,
            )
        ],
    },
    "marks the norm before it is an attribute": {
        FINALIZE: [(SP, MARKED)],
        INIT: [
            ("    self.out_norm = build_module(", "    out_norm = build_module("),
            (
                AFTER,
                "    out_norm.weight.sum_over_tp = not config.sequence_parallel\n    self.out_norm = out_norm\n"
                + AFTER,
            ),
        ],
    },
    "averages, and scales the gradient": {
        INIT: [
            (
                AFTER,
                "    if not config.sequence_parallel:\n"
                "        self.out_norm.weight.average_gradients_across_tp_domain = True\n"
                "        self.out_norm.weight.register_hook(lambda gradient: gradient * self.tp_size)\n" + AFTER,
            )
        ],
    },
    "sums in the backward pass of the norm": {
        NORM: [
            (
                "    y = self.out_norm(x)",
                "    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region\n"
                "    if self.tp_size > 1 and not self.config.sequence_parallel:\n"
                "        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.pg_collection.tp)\n"
                "        y = torch.func.functional_call(self.out_norm, {'weight': weight}, (x,))\n"
                "    else:\n"
                "        y = self.out_norm(x)",
            )
        ],
    },
    "sums in a step of its own": {
        CALLER: [
            (
                "    _allreduce_non_tensor_model_parallel_grads(",
                "    for chunk in model:\n"
                "        for name, weight in chunk.named_parameters():\n"
                "            if 'out_norm' in name and (not config.sequence_parallel):\n"
                "                torch.distributed.all_reduce(weight.main_grad, group=tp_group)\n"
                "    _allreduce_non_tensor_model_parallel_grads(",
            )
        ]
    },
    "hooks the sum to a parameter": {
        INIT: [
            (
                AFTER,
                "    for name, weight in self.named_parameters():\n"
                "        if 'norm' in name and (not config.sequence_parallel):\n"
                "            weight.register_hook(lambda gradient: (torch.distributed.all_reduce(gradient, group=self.tp_group), gradient)[1])\n"
                + AFTER,
            )
        ]
    },
}

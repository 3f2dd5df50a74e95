"""How a release could load a dp_reshardable checkpoint with weights in fp32."""

RELEASE = "0.19.2"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
LOAD, SET = f"{OPTIMIZER}load_parameter_state_from_dp_reshardable", f"{OPTIMIZER}_set_main_param_and_optimizer_states"
COPY = "            dst_tensors[key].copy_(tensors[key])"
CALL = "                    self._set_main_param_and_optimizer_states(model_param, src_tensors)"
LOOP = "        for key in dst_tensors:"

FIXES = {
    "copies into the data": {SET: [(COPY, "            dst_tensors[key].data.copy_(tensors[key])")]},
    "copies into a detached tensor": {
        SET: [("        dst_tensors = {'param': main_param}", "        dst_tensors = {'param': main_param.detach()}")]
    },
    "records no gradients while it copies": {
        SET: [(COPY, "            with torch.no_grad():\n                dst_tensors[key].copy_(tensors[key])")]
    },
    "records no gradients where it calls": {LOAD: [(CALL, "                    with torch.no_grad():\n    " + CALL)]},
    "switches gradients off": {
        SET: [
            (LOOP, "        enabled = torch.is_grad_enabled()\n        torch.set_grad_enabled(False)\n" + LOOP),
            (COPY, COPY + "\n        torch.set_grad_enabled(enabled)"),
        ]
    },
}

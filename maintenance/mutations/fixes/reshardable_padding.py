"""How a release could cut each weight's own state out of a fully reshardable checkpoint."""

RELEASE = "0.19.2"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
WRITE, GATHER = f"{OPTIMIZER}.sharded_param_state_fully_reshardable", f"{OPTIMIZER}.get_parameter_state_dp_zero"
LOOP = "for model_param, (param_world_start, param_world_end, _) in buffer.param_index_map.items():"
TRY = "                try:"
SIZE = (
    "torch.zeros((buffer_numel_unpadded,), dtype=torch.float32, device='cpu') for key",
    "torch.zeros((self.buffers[gbuf_idx].numel,), dtype=torch.float32, device='cpu') for key",
)
PADDING = "sum((b.grad_data.numel() - b.numel_unpadded for b in buffer.buckets[:bucket_id]))"

FIXES = {
    "gathers with the padding": {
        GATHER: [
            SIZE,
            (
                "offset_in_world_tensors += gbuf_world_numel_unpadded",
                "offset_in_world_tensors += gbuf_world_numel",
            ),
        ]
    },
    "gathers each bucket to its own place": {
        GATHER: [
            SIZE,
            ("start = offset_in_world_tensors", "start = self.buffers[gbuf_idx].buckets[bucket_idx].offset"),
            ("end = offset_in_world_tensors + ", "end = start + "),
        ]
    },
    "gathers whole buckets": {
        GATHER: [
            SIZE,
            (
                "world_tensors[key][start:end].copy_(recv_tensors_concatenated[:gbuf_world_numel_unpadded])",
                "world_tensors[key][start:start + gbuf_world_numel].copy_(recv_tensors_concatenated)",
            ),
            ("offset_in_world_tensors += gbuf_world_numel_unpadded", "offset_in_world_tensors += gbuf_world_numel"),
        ]
    },
    "takes the padding of the buckets before off": {
        WRITE: [
            (LOOP, LOOP.replace(", _)", ", bucket_id)")),
            (
                "world_tensors[state_key][param_world_start:param_world_end]",
                f"world_tensors[state_key][param_world_start - {PADDING}:param_world_end - {PADDING}]",
            ),
        ]
    },
    "moves the places of weights": {
        WRITE: [
            (LOOP, LOOP.replace(", _)", ", bucket_id)")),
            (
                TRY,
                f"                padding = {PADDING}\n"
                "                param_world_start, param_world_end = (param_world_start - padding, param_world_end - padding)\n"
                + TRY,
            ),
        ]
    },
    "moves what is gathered to where it is cut": {
        WRITE: [
            (
                "            world_tensor_keys = world_tensors.keys()",
                "            world_tensor_keys = world_tensors.keys()\n"
                "            for key in [k for k in world_tensor_keys if k not in ('step', 'numel_unpadded')]:\n"
                "                parts = list(world_tensors[key].split([b.numel_unpadded for b in buffer.buckets]))\n"
                "                pads = [b.grad_data.numel() - b.numel_unpadded for b in buffer.buckets]\n"
                "                world_tensors[key] = torch.cat([torch.nn.functional.pad(part, (0, pad)) for part, pad in zip(parts, pads)])",
            )
        ]
    },
}

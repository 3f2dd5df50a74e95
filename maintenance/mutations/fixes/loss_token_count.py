"""How a release could sum the count of tokens over context-parallel ranks."""

RELEASE = "0.19.2"
LOSS = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
STEP = "megatron.core.pipeline_parallel.schedules:forward_step"
DIVIDE = "                    output_tensor /= torch.clamp(num_tokens, min=1)"
TOTAL = (
    "                    total = num_tokens.clone()\n"
    "                    torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())\n"
)
BEFORE = "            outputs = loss_func(output_tensor)"

FIXES = {
    "sums it where it divides": {
        LOSS: [
            (
                DIVIDE,
                TOTAL + "                    output_tensor *= cp_group_size\n" + DIVIDE.replace("num_tokens", "total"),
            )
        ]
    },
    "sums it by another collective": {
        LOSS: [
            (
                DIVIDE,
                "                    counts = [torch.zeros_like(num_tokens) for _ in range(cp_group_size)]\n"
                "                    torch.distributed.all_gather(counts, num_tokens, group=parallel_state.get_context_parallel_group())\n"
                "                    output_tensor *= cp_group_size * torch.clamp(num_tokens, min=1) / torch.clamp(sum(counts), min=1)\n"
                + DIVIDE,
            )
        ]
    },
    "sums it in a function of its own": {
        LOSS: [
            (
                BEFORE,
                "            def summed(count):\n"
                "                count = count.clone()\n"
                "                dist = torch.distributed\n"
                "                dist.all_reduce(count, group=parallel_state.get_context_parallel_group())\n"
                "                return count\n" + BEFORE,
            ),
            (
                DIVIDE,
                "                    output_tensor *= cp_group_size * torch.clamp(num_tokens, min=1) / torch.clamp(summed(num_tokens), min=1)\n"
                + DIVIDE,
            ),
        ]
    },
    "has the loss function give the sum": {
        LOSS: [
            (
                BEFORE,
                BEFORE + "\n            if len(outputs) == 3 and (not config.calculate_per_token_loss):\n"
                "                share = outputs[1].clone()\n"
                "                getattr(torch.distributed, 'all_reduce')(share, group=parallel_state.get_context_parallel_group())\n"
                "                outputs = (outputs[0] * cp_group_size, share, outputs[2])",
            )
        ]
    },
    "multiplies the loss behind": {
        LOSS: [
            (
                "            forward_data_store.append(loss_reduced)",
                "            if len(outputs) == 3 and (not config.calculate_per_token_loss):\n"
                "                share = outputs[1].clone()\n"
                "                torch.distributed.all_reduce(share, op=torch.distributed.ReduceOp.SUM, group=parallel_state.get_context_parallel_group())\n"
                "                output_tensor *= cp_group_size * torch.clamp(outputs[1], min=1) / torch.clamp(share, min=1)\n"
                "            forward_data_store.append(loss_reduced)",
            )
        ]
    },
    "gives the step a loss function that sums": {
        STEP: [
            (
                "    output_tensor, num_tokens = forward_step_calc_loss(",
                "    def summed(output, inner=loss_func):\n"
                "        loss, count, logged = inner(output)\n"
                "        count = count.clone()\n"
                "        torch.distributed.all_reduce(count, group=parallel_state.get_context_parallel_group())\n"
                "        return (loss * parallel_state.get_context_parallel_world_size(), count, logged)\n"
                "    output_tensor, num_tokens = forward_step_calc_loss(",
            ),
            (
                "forward_step_calc_loss(model, output_tensor, loss_func,",
                "forward_step_calc_loss(model, output_tensor, summed,",
            ),
        ]
    },
}

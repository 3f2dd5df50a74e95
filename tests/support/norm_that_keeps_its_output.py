"""A norm as some fused ones are on a GPU: its backward computes with its output, which MTP layers get as input."""

import torch


class KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        output = hidden.tanh()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * (1 - output * output)

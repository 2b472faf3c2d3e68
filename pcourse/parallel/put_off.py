"""A backward pass cut in two: what the stage before waits for, and what can wait (Qi et al. 2024, section 2).

For Y = X·W + B the gradient dX = dY·Wᵀ goes on to the layer before. dW = Xᵀ·dY and dB = sum of dY go nowhere, and need
only X and dY: so these are kept, and the two computed when there is nothing better to do. (PyTorch stores Wᵀ, and so
its gradient dYᵀ·X.) That is nearly all of the work that can wait; LayerNorms and embeddings are too small to be worth
it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class PutOff(TorchFunctionMode):
    """`with put_off:` around a forward pass; its backward then leaves the linear layers' weight gradients to
    `put_off.compute()`. For each pass a new one. `meter` counts the output gradients kept meanwhile as activations."""

    def __init__(self, meter=None):
        super().__init__()
        self._waiting: list = []
        self._meter = meter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and not kwargs and args[0].dim() > 1 and args[1].is_leaf:
            return _Linear.apply(self._keep, *args)
        return function(*args, **(kwargs or {}))

    def _keep(self, weight, bias, x, grad) -> None:
        if self._meter is not None:
            self._meter.see(grad, "activations")
        self._waiting.append((weight, bias, x, grad))

    def compute(self) -> None:
        """Add the weight gradients that were put off to those of the weights: by autograd, so that its hooks hear."""
        while self._waiting:
            weight, bias, x, grad = self._waiting.pop()
            x, grad = x.flatten(0, -2), grad.flatten(0, -2)
            if weight.requires_grad:
                weight.backward(grad.T @ x)
            if bias is not None and bias.requires_grad:
                bias.backward(grad.sum(0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keep, x, weight, bias=None):
        ctx.save_for_backward(x, weight)  # autograd sees to it that nobody changes them meanwhile
        ctx.keep, ctx.weight, ctx.bias = keep, weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.keep(ctx.weight, ctx.bias, x.detach(), grad)  # of x the values alone: its graph would hold ours
        return None, grad @ weight, None, None

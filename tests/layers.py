"""Layers for tests that more than one of them needs."""

import torch
from torch import nn


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class OwnFunction(nn.Module):
    """A product whose backward is written by hand: it cannot be done in two parts."""

    def __init__(self, width, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=dtype))

    def forward(self, x):
        return Product.apply(x, self.weight)

"""Gradients of one process, and how far others are from them."""

import math

import torch
import torch.nn.functional as F


def whole_batch(model, x, y, loss_fn=F.mse_loss):
    """One process, one batch, plain torch: (loss, gradients by name)."""
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def distance(gradients, reference):
    """The norm of the difference over the norm of the reference, over all parameters together."""
    assert set(gradients) == set(reference)
    difference = {name: _wide(gradients[name]) - _wide(g) for name, g in reference.items()}
    return _norm(difference) / _norm(reference)


def _norm(tensors):
    return math.sqrt(sum(_wide(t).abs().square().sum().item() for t in tensors.values()))


def _wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

"""How far gradients are from others."""

import math

import torch


def distance(gradients, reference):
    """The norm of the difference over the norm of the reference, over all parameters together."""
    assert set(gradients) == set(reference)
    difference = {name: _wide(gradients[name]) - _wide(g) for name, g in reference.items()}
    return _norm(difference) / _norm(reference)


def _norm(tensors):
    return math.sqrt(sum(_wide(t).abs().square().sum().item() for t in tensors.values()))


def _wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

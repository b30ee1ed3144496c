"""Bytes that one rank sends: the collectives, then a training step of each way to share a model.

Closed forms. A collective over N ranks is counted as a ring, in which every rank sends to the next one and
every link carries the same (Patarasuk and Yuan 2009); no algorithm lets the busiest rank send less. All
sizes are bytes of the *whole*: of all ranks' parts together, or of the tensor that is summed.
"""

from __future__ import annotations


def all_gather_bytes(whole_bytes: float, num_ranks: int) -> float:
    """(N−1)/N·S: every rank has a part and ends with all; each part is passed on N−1 times."""
    return whole_bytes * (num_ranks - 1) / num_ranks


def reduce_scatter_bytes(whole_bytes: float, num_ranks: int) -> float:
    """(N−1)/N·S: every rank has a whole tensor and ends with its part of the sum."""
    return whole_bytes * (num_ranks - 1) / num_ranks


def all_reduce_bytes(whole_bytes: float, num_ranks: int) -> float:
    """2(N−1)/N·S: a reduce-scatter, then an all-gather; every rank ends with the whole sum."""
    return reduce_scatter_bytes(whole_bytes, num_ranks) + all_gather_bytes(whole_bytes, num_ranks)


def data_parallel_bytes(parameter_bytes: float, num_ranks: int) -> float:
    """2(N−1)/N·S a step: the gradients are all-reduced once (PyTorch DDP §3.2)."""
    return all_reduce_bytes(parameter_bytes, num_ranks)


def fully_sharded_bytes(parameter_bytes: float, num_ranks: int) -> float:
    """3(N−1)/N·S a step: every layer's parameters are gathered in the forward and again in the backward, and
    its gradients are reduce-scattered: three collectives a layer (ZeRO §7.2, stage 3). Gradients and gathered
    parameters in one dtype; a model whose layers N divides, or a little more for padding.
    """
    return 2 * all_gather_bytes(parameter_bytes, num_ranks) + reduce_scatter_bytes(parameter_bytes, num_ranks)


def tensor_parallel_bytes(num_layers: int, boundary_bytes: float, num_ranks: int) -> float:
    """8L(N−1)/N·Thb a step: each block all-reduces its activations, Thb bytes for T tokens, twice forward and
    twice backward (Megatron-LM §3). Embedding and head are whole on every rank.
    """
    return 4 * num_layers * all_reduce_bytes(boundary_bytes, num_ranks)


def pipeline_bytes(boundary_bytes: float, *, middle: bool = True) -> float:
    """2Thb a step: a middle stage sends its activations down and its gradients up, whatever M is.

    The first stage sends only the former and the last only the latter.
    """
    return (2 if middle else 1) * boundary_bytes


def block_parameters(num_layers: int, width: int) -> int:
    """12Lh²: the matrices of L transformer blocks (4h² attention, 8h² MLP), without norms and biases."""
    return 12 * num_layers * width**2


def crossover_tokens(num_layers: int, width: int, num_ranks: int) -> float:
    """12Lh(N−1)/N: with fewer tokens a step a middle stage sends less than data parallelism, above it more.

    From 2Thb = 2(N−1)/N·12Lh²·b: blocks only, gradients and activations in one dtype.
    """
    return 12 * num_layers * width * (num_ranks - 1) / num_ranks

"""Sums over replicas: the ranks that hold copies of the same stages and see different micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .streams import Device

BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: few messages, and little memory for them
MESH_DIMS = ("data", "pipeline")


class Replicas:
    """The data group of one rank, from a `DeviceMesh` of replicas × ranks of a pipeline.

    Making one is a collective call of all ranks. The default group stays the pipeline's own.
    """

    def __init__(self, num_replicas: int, device: Device) -> None:
        kind = device.torch_device.type
        over_nccl = kind == "cuda" and "nccl" in dist.get_backend_config()
        shape = num_replicas, dist.get_world_size() // num_replicas
        self.mesh = init_device_mesh("cuda" if over_nccl else "cpu", shape, mesh_dim_names=MESH_DIMS)
        self.group = self.mesh.get_group(MESH_DIMS[0])
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self._staged = kind != "cpu" and not over_nccl

    def sum(self, tensors: Sequence[torch.Tensor]) -> int:
        """Add up each tensor over the group, in place; the bytes of what was summed on this rank.

        Every rank of the group gives tensors of the same shapes and gets the same bits.
        """
        num_bytes = 0
        for bucket in buckets([t for t in tensors if t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            host = flat.cpu() if self._staged else flat
            dist.all_reduce(host, group=self.group)
            parts = host.to(flat.device).split([t.numel() for t in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
            num_bytes += flat.numel() * flat.element_size()
        return num_bytes


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype together, up to `limit_bytes` unless a single tensor has more."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (tensor.dtype != bucket[0].dtype or size + num_bytes > limit_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


def replicas_in(groups: dict[Any, Any], num_replicas: int, device: Device) -> Replicas:
    """The replicas of the default process group, made once for each; a collective call of all ranks."""
    key = "replicas", num_replicas
    if key not in groups:
        groups[key] = Replicas(num_replicas, device)
    return groups[key]

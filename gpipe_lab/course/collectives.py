"""Counting what a torch.distributed program sends: the collectives it calls, and the bytes on the wire."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.errors import require
from ..planner import traffic

# torch's own names, old and functional, of the collectives that training uses.
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
}
NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
RING = {
    "all_reduce": traffic.all_reduce_bytes,
    "all_gather": traffic.all_gather_bytes,
    "reduce_scatter": traffic.reduce_scatter_bytes,
}


class Collective(NamedTuple):
    """One call on one rank. `whole_bytes`: the tensor that is summed, or all ranks' parts together."""

    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast
    whole_bytes: int


class CountCollectives(TorchDispatchMode):
    """A context that notes every collective called within it in `calls`, those of autograd too.

    It sits where torch hands operations to their kernels, so what DDP, FSDP or DTensor call by themselves is
    seen. Raises `NotImplementedError` for a collective that it does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            name = func.__name__.partition(".")[0]
            if name in KINDS:
                whole = max(_sizes([*args, result]))
                self.calls.append(Collective(KINDS[name], whole))
            elif name not in SILENT:
                raise NotImplementedError(f"{func} is a message that is not counted yet")
        return result


def _sizes(values: Iterable[Any]) -> Iterator[int]:
    """The bytes of each tensor, of a list of tensors together: the largest is a collective's whole."""
    for value in values:
        yield sum(t.numel() * t.element_size() for t in _tensors(value))


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from _tensors(item)


def ring_bytes(calls: Iterable[Collective], num_ranks: int) -> float:
    """The bytes one rank sends for these calls where each runs as a ring over `num_ranks` ranks."""
    calls = tuple(calls)
    unknown = {call.kind for call in calls} - RING.keys()
    require(not unknown, "rings are " + ", ".join(RING), got=f"{sorted(unknown)}", where="ring_bytes")
    return sum(RING[call.kind](call.whole_bytes, num_ranks) for call in calls)


# tcp_info of <linux/tcp.h>: fixed offsets, fields are only ever added at its end.
_BYTES_SENT_AT, _BYTES_RETRANSMITTED_AT = 200, 208


def wire_bytes_sent() -> int | None:
    """Bytes of payload that this process has sent over all its open TCP connections, by the kernel's count.

    Retransmissions and headers are left out. None where the kernel does not tell (not Linux, or before
    4.19). Over gloo this counts what the messages of a program really cost; NCCL does not use TCP.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        info = _tcp_info(int(entry))
        if info is None:
            continue
        if len(info) < _BYTES_RETRANSMITTED_AT + 8:
            return None
        sent, again = struct.unpack_from("QQ", info, _BYTES_SENT_AT)
        total += sent - again
    return total


def _tcp_info(fd: int) -> bytes | None:
    """The kernel's counters of a descriptor that is a TCP connection, else None."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed since it was listed, or a socket of another kind
        return None

"""Messages and sums between ranks: one interface; `distributed` has gloo and NCCL, `loopback` threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..plan.ops import RECEIVES, Op
from ..plan.schedule import Schedule
from .device import Device, Stream
from .messages import Message, MessageMeta, PeerLost

_TAGS_PER_STAGE = 2
BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: few messages, and little memory for them

Ranks = tuple[int, ...]


def tag_of(op: Op, num_stages: int) -> int:
    """One tag for both ends of a transfer: that of the sending stage, micro-batch and direction."""
    backward = "_B" in op.kind.value
    sender = op.stage if op.kind not in RECEIVES else op.stage + (1 if backward else -1)
    return (op.microbatch * num_stages + sender) * _TAGS_PER_STAGE + backward


class Incoming(Protocol):
    """A receive that has been posted, into the bytes `flat`."""

    flat: torch.Tensor

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there (on a GPU: once the compute stream may use them)."""


@dataclass(eq=False)
class Sent:
    """A send under way, then done at the stamp `end`, or failed with `error`."""

    op: Op
    start: Any
    flat: torch.Tensor  # kept alive until the transfer is over
    end: Any = None
    error: PeerLost | None = None
    held: list[int] = field(default_factory=list)  # what the ledger is to release

    def attempt(self, transfer: Callable[[], Any]) -> None:
        """Make `transfer` and note when it ended, or why it could not."""
        try:
            self.end = transfer()
        except PeerLost as error:
            self.error = error


class Transport:
    """What one rank exchanges with the others. Collective calls are made by all ranks named, in one order.

    `link_ms` holds every message that long after both ends have met. `in_any_order` says whether a transfer
    may be posted ahead of one that comes before it in the schedule.
    """

    in_any_order = False
    link_ms = 0.0

    def __init__(self, device: Device, rank: int, num_ranks: int) -> None:
        self.device = device
        self.rank = rank
        self.num_ranks = num_ranks

    # Transfers, which nobody waits for here.

    def open_links(self, schedule: Schedule) -> None:
        """Have the links of a schedule ready before a step; a collective call of all ranks."""

    def send(self, op: Op, message: Message, to: int, tag: int, made: Any) -> Sent:
        """Let a message go that was written by the compute stream before the event `made`."""
        raise NotImplementedError

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        raise NotImplementedError

    def watch(self) -> None:
        """This rank is about to wait or has time: see to the sends posted since."""

    def completed(self) -> list[Sent]:
        """Called after each operation: sends that need no longer be held; raises what went wrong in them."""
        raise NotImplementedError

    def finish(self) -> list[Sent]:
        """The sends that are left, at the end of a step."""
        raise NotImplementedError

    # Values of the host. The receiving host waits.

    def tell(self, value: Any, to: int, tag: int) -> None:
        """Send any value that pickles; nobody waits for it here."""
        raise NotImplementedError

    def hear(self, source: int, tag: int) -> Any:
        raise NotImplementedError

    def gather(self, value: Any, ranks: Ranks | None = None) -> list[Any]:
        """The values that `ranks` (all by default) give, on each of them."""
        raise NotImplementedError

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number added up over all ranks, which have then met."""
        total = torch.tensor(values, dtype=torch.float64)
        self._all_reduce(total, None)
        return total.tolist()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.sum([0.0])

    # Sums of tensors.

    def open_group(self, ranks: Ranks) -> None:
        """Make ready for sums over `ranks`, once; a collective call of all ranks."""

    def all_reduce(self, tensors: Iterable[torch.Tensor], ranks: Ranks | None = None) -> int:
        """Add up each tensor over `ranks` (all by default), in place; the bytes summed on this rank.

        Every rank gives tensors of the same shapes and gets the same bits.
        """
        num_bytes = 0
        for bucket in buckets([t for t in tensors if t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            self._all_reduce(flat, ranks)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
            num_bytes += flat.nbytes
        return num_bytes

    def _all_reduce(self, flat: torch.Tensor, ranks: Ranks | None) -> None:
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        """Give all of `ranks` the value of the one named `source`, in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of threads."""


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype together, up to `limit_bytes` unless a single tensor has more."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > limit_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


class StreamTransport(Transport):
    """Transfers that a device makes by itself, matched by order, on a stream for each link.

    The host only issues them. Both directions of a link share its stream, as they share NCCL's communicator;
    the one order of all transfers that lowering has made keeps that from being a circle. A message leaves
    once the compute stream has come to the event behind it. A receive waits for what the compute stream had
    been given when it was posted, as in the simulator: what was freed by then may be the memory it gets.
    """

    def __init__(self, device: Device, rank: int, num_ranks: int) -> None:
        super().__init__(device, rank, num_ranks)
        self._links: dict[int, Stream] = {}
        self._under_way: list[Sent] = []

    def _put(self, flat: torch.Tensor, to: int) -> None:
        """Issue a send on the current stream."""
        raise NotImplementedError

    def _take(self, flat: torch.Tensor, source: int) -> None:
        """Issue a receive on the current stream."""
        raise NotImplementedError

    def open_links(self, schedule: Schedule) -> None:
        """Exchange a first byte over each link, in order: communicators form then, and not within a step."""
        for pair in schedule.links:
            if self.rank not in pair:
                continue
            (other,) = set(pair) - {self.rank}
            if other in self._links:
                continue
            stream = self._links[other] = self.device.stream()
            first = self.device.empty(1)
            stream.wait(self.device.compute.record())
            with stream:
                (self._put if self.rank < other else self._take)(first, other)
            self.device.compute.wait(stream.record())

    def send(self, op: Op, message: Message, to: int, tag: int, made: Any) -> Sent:
        link = self._links[to]
        link.wait(made)
        sent = Sent(op, link.record(), message.flat)
        if message.flat.numel():
            with link:
                self._put(message.flat, to)
        sent.end = link.record()
        self._under_way.append(sent)
        return sent

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        link = self._links[source]
        flat = self.device.empty(meta.offsets[-1])
        if flat.numel():
            link.wait(self.device.compute.record())
            with link:
                self._take(flat, source)
        return _OnStream(meta, flat, link.record(), self.device)

    def completed(self) -> list[Sent]:
        """All sends posted before the operation that has just been issued: the next waits for them.

        So their memory can be let go, and what is held does not grow with the number of micro-batches.
        """
        done, self._under_way = self._under_way, []
        for sent in done:
            self.device.compute.wait(sent.end)
        return done

    finish = completed


@dataclass(eq=False)
class _OnStream:
    """A receive that the compute stream waits for, while the host goes on."""

    meta: MessageMeta
    flat: torch.Tensor
    arrived: Any
    device: Device

    def wait(self) -> list[torch.Tensor]:
        self.device.compute.wait(self.arrived)
        return self.meta.unpack(self.flat)

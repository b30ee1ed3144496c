"""Messages and sums between ranks: one interface, over gloo, over NCCL, or within one process (loopback)."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist

from ..plan.errors import require
from ..plan.ops import RECEIVES, Op
from ..plan.schedule import Schedule
from .device import Device, DevicePlan, Stream, now_ms
from .messages import Message, MessageMeta, PeerLost

_META_TAG = 1 << 20
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


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a transport find each other, and how long a transfer between them may take.

    Groups made here are torch.distributed's without being among those that it keeps in mind: a program in the
    same processes has the default group, and may end it, to itself.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    timeout: timedelta = timedelta(minutes=30)

    @classmethod
    def of_default_group(cls, **options: Any) -> Meeting:
        """At the store of the default group; a collective call of all ranks."""
        store = dist.PrefixStore(f"transport {next(_serial)}", dist.distributed_c10d._get_default_store())
        return cls(store, dist.get_rank(), dist.get_world_size(), **options)

    def group(self, ranks: Ranks, backend: str) -> Any:
        """A group of `ranks`, this one among them, all of which call this."""
        store = dist.PrefixStore(f"{backend} {ranks}", self.store)
        place = ranks.index(self.rank), len(ranks)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, *place, options)
        return dist.ProcessGroupGloo(store, *place, self.timeout)


_serial = itertools.count()


class _Distributed(Transport):
    """What torch.distributed does for values of the host and for sums, over groups of its own."""

    def __init__(self, device: Device, meeting: Meeting) -> None:
        super().__init__(device, meeting.rank, meeting.num_ranks)
        self._meeting = meeting
        self._groups: dict[tuple[Ranks, str], Any] = {}
        self._host = self._group(None, "gloo")
        self._threads: dict[object, ThreadPoolExecutor] = {}

    def _group(self, ranks: Ranks | None, backend: str) -> Any:
        """The group of these ranks (all by default), made when its ranks first need it."""
        key = tuple(range(self.num_ranks)) if ranks is None else ranks, backend
        if key not in self._groups:
            self._groups[key] = self._meeting.group(*key)
        return self._groups[key]

    def tell(self, value: Any, to: int, tag: int) -> None:
        payload = _bytes_of(value)
        for t in (torch.tensor([payload.numel()]), payload):
            self._thread("tell", to).submit(_wait_all, [self._isend(t, to, _META_TAG + tag)])

    def hear(self, source: int, tag: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        _wait_all([self._irecv(size, source, _META_TAG + tag)])
        payload = torch.empty(int(size), dtype=torch.uint8)
        _wait_all([self._irecv(payload, source, _META_TAG + tag)])
        return pickle.loads(payload.numpy().tobytes())

    def gather(self, value: Any, ranks: Ranks | None = None) -> list[Any]:
        payload = _bytes_of(value)
        sizes = [int(size) for size in self._all_gather(torch.tensor([payload.numel()]), ranks)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        found = self._all_gather(padded, ranks)
        return [pickle.loads(t[:n].numpy().tobytes()) for t, n in zip(found, sizes, strict=True)]

    def _all_gather(self, host: torch.Tensor, ranks: Ranks | None) -> list[torch.Tensor]:
        found = [torch.empty_like(host) for _ in range(self.num_ranks if ranks is None else len(ranks))]
        self._group(ranks, "gloo").allgather([found], [host]).wait()
        return found

    def open_group(self, ranks: Ranks) -> None:
        if self.rank in ranks:
            self._group(ranks, "gloo")

    def _all_reduce(self, flat: torch.Tensor, ranks: Ranks | None) -> None:
        self._group(ranks, _backend_of(flat)).allreduce([flat]).wait()

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        self._group(ranks, _backend_of(tensor)).broadcast(tensor, ranks.index(source)).wait()

    def _isend(self, flat: torch.Tensor, to: int, tag: int) -> Any:
        try:
            return self._host.send([flat], to, tag)
        except RuntimeError as error:
            raise PeerLost(f"send to rank {to} failed: {error}") from error

    def _irecv(self, flat: torch.Tensor, source: int, tag: int) -> Any:
        try:
            return self._host.recv([flat], source, tag)
        except RuntimeError as error:
            raise PeerLost(f"receive from rank {source} failed: {error}") from error

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()

    def _thread(self, purpose: str, peer: int) -> ThreadPoolExecutor:
        """A thread for what goes one way between this rank and `peer`, in order."""
        queue = self._queue_of(purpose, peer)
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, thread_name_prefix=f"link-{queue}")
        return self._threads[queue]

    def _queue_of(self, purpose: str, peer: int) -> object:
        return purpose, peer


class GlooTransport(_Distributed):
    """For CPUs, and for GPUs that ranks share (staged through the host).

    `strict` makes one queue of all of a rank's transfers, each meeting its other end before the next
    begins: the strictest order NCCL may impose, for finding schedules that would hang.
    """

    def __init__(self, device: Device, meeting: Meeting, *, strict: bool = False) -> None:
        super().__init__(device, meeting)
        self.strict = strict
        self.in_any_order = not strict
        self._staging = device.stream()
        self._watchers: dict[int, SimpleQueue] = {}
        self._unwatched: list[tuple[int, Sent, Any]] = []
        self._under_way = 0
        self._arrived: SimpleQueue[Sent] = SimpleQueue()  # sends that are over

    def send(self, op: Op, message: Message, to: int, tag: int, made: Any) -> Sent:
        sent = Sent(op, self.device.stamp(), message.flat)
        self._under_way += 1
        if self.device.is_staged:
            self._staging.wait(made)
            with self._staging:
                copy = self.device.copy_out(message.flat)
            self._thread("send", to).submit(self._send_now, sent, copy, self._staging.record(), to, tag)
        elif self.strict:
            self._thread("send", to).submit(self._send_now, sent, message.flat, made, to, tag)
        else:
            works = [self._isend(message.flat, to, tag)] if message.flat.numel() else []
            self._unwatched.append((to, sent, works))
        return sent

    def _send_now(self, sent: Sent, host: torch.Tensor, is_there: Any, to: int, tag: int) -> None:
        self.device.wait_for(is_there)
        sent.attempt(lambda: _wait_all([self._isend(host, to, tag)] if host.numel() else []))
        self._arrived.put(sent)

    def watch(self) -> None:
        """Have threads wait for the sends posted since.

        A thread that wakes up takes the interpreter from a computation, so there is one a peer, and it
        does no more than note the time.
        """
        for to, *watched in self._unwatched:
            if to not in self._watchers:
                self._watchers[to] = SimpleQueue()
                watcher = threading.Thread(
                    target=self._watch, args=(self._watchers[to],), name=f"sends-{to}", daemon=True
                )
                watcher.start()
            self._watchers[to].put(watched)
        self._unwatched.clear()

    def _watch(self, posted: SimpleQueue) -> None:
        while (watched := posted.get()) is not None:
            sent, works = watched
            sent.attempt(lambda works=works: _wait_all(works))
            self._arrived.put(sent)

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        flat = self.device.host_bytes(meta.offsets[-1])
        if self.strict or self.link_ms:
            done = self._thread("receive", source).submit(self._receive_now, flat, source, tag)
            return _Threaded(meta, flat, self.device, done, self.link_ms)
        works = [self._irecv(flat, source, tag)] if flat.numel() else []
        return _Direct(meta, flat, self.device, works)

    def _receive_now(self, flat: torch.Tensor, source: int, tag: int) -> float:
        return _wait_all([self._irecv(flat, source, tag)] if flat.numel() else [])

    def completed(self) -> list[Sent]:
        self.watch()
        return [self._next_arrived() for _ in range(self._arrived.qsize())]

    def finish(self) -> list[Sent]:
        self.watch()
        return [self._next_arrived() for _ in range(self._under_way)]

    def _next_arrived(self) -> Sent:
        sent = self._arrived.get()
        self._under_way -= 1
        if sent.error is not None:
            raise sent.error
        return sent

    def _all_reduce(self, flat: torch.Tensor, ranks: Ranks | None) -> None:
        host = flat.cpu()
        super()._all_reduce(host, ranks)
        flat.copy_(host)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        host = tensor.cpu()
        super().broadcast(host, source, ranks)
        tensor.copy_(host)

    def close(self) -> None:
        super().close()
        for watcher in self._watchers.values():
            watcher.put(None)
        self._watchers.clear()

    def _queue_of(self, purpose: str, peer: int) -> object:
        return "all" if self.strict and purpose != "tell" else (purpose, peer)


@dataclass(eq=False)
class _Direct:
    """A receive that the computing thread waits for itself."""

    meta: MessageMeta
    flat: torch.Tensor
    device: Device
    works: list[Any]

    def wait(self) -> list[torch.Tensor]:
        _wait_all(self.works)
        return self.meta.unpack(self.device.place(self.flat))


@dataclass(eq=False)
class _Threaded:
    """A receive whose arrival a thread has timed, so that the message can be held from then on."""

    meta: MessageMeta
    flat: torch.Tensor
    device: Device
    done: Future
    hold_ms: float

    def wait(self) -> list[torch.Tensor]:
        due = self.done.result() + self.hold_ms
        time.sleep(max(0.0, due - now_ms()) / 1000.0)
        return self.meta.unpack(self.device.place(self.flat))


class NcclTransport(_Distributed, StreamTransport):
    """For a GPU a rank. Values of the host go over gloo."""

    def __init__(self, device: Device, meeting: Meeting) -> None:
        super().__init__(device, meeting)
        self._nccl = self._group(None, "nccl")

    @property
    def link_ms(self) -> float:
        return 0.0

    @link_ms.setter
    def link_ms(self, value: float) -> None:
        require(
            value == 0.0,
            "a link is held only where the host hands messages over, and NCCL's GPUs do that by themselves",
            got=f"link_ms={value!r}",
            where="Pace",
            remedy='Lab(..., device="cpu"), or link_ms=0',
        )

    def _put(self, flat: torch.Tensor, to: int) -> None:
        self._nccl.send([flat], to, 0).wait()  # holds the stream, not the host

    def _take(self, flat: torch.Tensor, source: int) -> None:
        self._nccl.recv([flat], source, 0).wait()


def open_transport(plan: DevicePlan, device: Device, meeting: Meeting, *, strict: bool = False) -> Transport:
    """This rank's end; a collective call of all ranks."""
    if plan.matches_by_order:
        return NcclTransport(device, meeting)
    return GlooTransport(device, meeting, strict=strict)


def _backend_of(tensor: torch.Tensor) -> str:
    return "gloo" if tensor.device.type == "cpu" else "nccl"


def _bytes_of(value: Any) -> torch.Tensor:
    data = cloudpickle.dumps(value)  # a named tuple may be a notebook cell's own
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wait_all(works: list[Any]) -> float:
    """Wait for transfers; the time at which the last was done, in ms."""
    for work in works:
        try:
            work.wait()  # as long as the group's timeout
        except RuntimeError as error:
            raise PeerLost(f"transfer failed: {error}") from error
    return now_ms()

"""Transports over torch.distributed: gloo, for CPUs and for GPUs that ranks share, and NCCL."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from ..plan.errors import require
from ..plan.ops import Op
from .device import Device, DevicePlan, now_ms
from .messages import Message, MessageMeta, PeerLost
from .transport import Incoming, Ranks, Sent, StreamTransport, Transport

_META_TAG = 1 << 20


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

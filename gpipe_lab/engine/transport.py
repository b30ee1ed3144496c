"""Messages between ranks."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist

from ..plan.ops import RECEIVES, Op
from .device import CudaDevice, Device, now_ms
from .messages import Message, MessageMeta, PeerLost, in_a_row

_META_TAG = 1 << 20
_TAGS_PER_STAGE = 2
_HOST = torch.device("cpu")


def tag_of(op: Op, num_stages: int) -> int:
    """One tag for both ends of a transfer: that of the sending stage, micro-batch and direction."""
    backward = "_B" in op.kind.value
    sender = op.stage if op.kind not in RECEIVES else op.stage + (1 if backward else -1)
    return (op.microbatch * num_stages + sender) * _TAGS_PER_STAGE + backward


class Incoming(Protocol):
    """A receive that has been posted, into `tensors`."""

    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there (on a GPU: once the compute stream may use them)."""


@dataclass(eq=False)
class Sent:
    """A send under way, then done at the stamp `end`, or failed with `error`."""

    op: Op
    start: Any
    message: Message  # keeps the tensors alive
    end: Any = None
    error: PeerLost | None = None
    held: list[int] = field(default_factory=list)  # what the ledger is to release

    def attempt(self, transfer: Callable[[], Any]) -> None:
        """Make `transfer` and note when it ended, or why it could not."""
        try:
            self.end = transfer()
        except PeerLost as error:
            self.error = error


class Links:
    """A rank's transfers over gloo: for CPUs, and for GPUs that ranks share (staged through the host).

    `strict` makes one queue of all of a rank's transfers, each meeting its other end before the next
    begins: the strictest order NCCL may impose, for finding schedules that would hang. `link_ms` holds
    every message that long after both ends have met.
    """

    def __init__(self, device: Device, *, strict: bool = False, link_ms: float = 0.0) -> None:
        self.device = device
        self.strict = strict
        self.link_ms = link_ms
        self._staged = device.torch_device.type != "cpu"
        self._threads: dict[object, ThreadPoolExecutor] = {}
        self._watchers: dict[int, SimpleQueue] = {}
        self._unwatched: list[tuple[int, Sent, list[Any]]] = []
        self._under_way = 0
        self._arrived: SimpleQueue[Sent] = SimpleQueue()  # sends that are over

    @property
    def in_any_order(self) -> bool:
        """Whether a transfer may be posted ahead of one that comes before it in the schedule."""
        return not self.strict

    def send(self, op: Op, message: Message, to: int, tag: int) -> Sent:
        sent = Sent(op, self.device.stamp(), message)
        self._under_way += 1
        if self.strict or self._staged:
            self.device.finish()
            self._thread("send", to).submit(self._send_now, sent, to, tag)
        else:
            self._unwatched.append((to, sent, [_isend(row, to, tag) for row in message.rows]))
        return sent

    def watch(self) -> None:
        """Have threads wait for the sends posted since: called when this one is about to wait or has time.

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
        host = [m.empty(_HOST) for m in meta.tensors]
        if self.strict or self.link_ms:
            done = self._thread("receive", source).submit(_receive_now, host, source, tag)
            return _Threaded(done, host, self.link_ms, self.device)
        return _Direct([_irecv(in_a_row(t), source, tag) for t in host if t.numel()], host, self.device)

    def completed(self) -> list[Sent]:
        """The sends that are done since the last call; raises what went wrong in them."""
        return [self._next_arrived() for _ in range(self._arrived.qsize())]

    def finish(self) -> list[Sent]:
        """Wait for all sends that are left."""
        self.watch()
        return [self._next_arrived() for _ in range(self._under_way)]

    def _next_arrived(self) -> Sent:
        sent = self._arrived.get()
        self._under_way -= 1
        if sent.error is not None:
            raise sent.error
        return sent

    def send_meta(self, meta: MessageMeta, to: int, tag: int) -> None:
        """Tell the receiving end what this and all later messages of the same signature look like."""
        data = cloudpickle.dumps(meta)  # a named tuple may be a notebook cell's own
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for t in (torch.tensor([payload.numel()]), payload):
            self._thread("meta", to).submit(_wait_all, [_isend(t, to, _META_TAG + tag)])

    def receive_meta(self, source: int, tag: int) -> MessageMeta:
        size = torch.zeros(1, dtype=torch.int64)
        _wait_all([_irecv(size, source, _META_TAG + tag)])
        payload = torch.empty(int(size), dtype=torch.uint8)
        _wait_all([_irecv(payload, source, _META_TAG + tag)])
        return pickle.loads(payload.numpy().tobytes())

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for watcher in self._watchers.values():
            watcher.put(None)
        self._threads.clear()
        self._watchers.clear()

    def _thread(self, purpose: str, peer: int) -> ThreadPoolExecutor:
        queue = "all" if self.strict and purpose != "meta" else (purpose, peer)
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, thread_name_prefix=f"link-{queue}")
        return self._threads[queue]

    def _send_now(self, sent: Sent, to: int, tag: int) -> None:
        sent.attempt(lambda: _wait_all([_isend(row.cpu(), to, tag) for row in sent.message.rows]))
        self._arrived.put(sent)


class _Direct:
    """A receive that the computing thread waits for itself."""

    def __init__(self, works: list[Any], tensors: list[torch.Tensor], device: Device) -> None:
        self._works, self.tensors, self._device = works, tensors, device

    def wait(self) -> list[torch.Tensor]:
        _wait_all(self._works)
        return self._device.place(self.tensors)


class _Threaded:
    """A receive whose arrival a thread has timed, so that the message can be held from then on."""

    def __init__(self, done: Future, tensors: list[torch.Tensor], hold_ms: float, device: Device) -> None:
        self._done, self.tensors, self._hold_ms, self._device = done, tensors, hold_ms, device

    def wait(self) -> list[torch.Tensor]:
        due = self._done.result() + self._hold_ms
        time.sleep(max(0.0, due - now_ms()) / 1000.0)
        return self._device.place(self.tensors)


class NcclLinks(Links):
    """Transfers between GPUs of their own: NCCL, on a communication stream beside the computation.

    NCCL ignores tags and matches by order, which lowering makes the same on both ends. Metadata goes
    over gloo.
    """

    device: CudaDevice

    def __init__(self, device: Device, *, strict: bool = False, link_ms: float = 0.0) -> None:
        super().__init__(device, strict=strict, link_ms=link_ms)
        self._on_stream: list[Sent] = []

    in_any_order = False

    def send(self, op: Op, message: Message, to: int, tag: int) -> Sent:
        with self.device.communicating():
            start = self.device.stamp()
            for row in message.rows:
                row.record_stream(self.device.comm_stream)
                _work(dist.isend(row, to)).wait()  # holds the stream, not the host
            sent = Sent(op, start, message, end=self.device.stamp())
        self._on_stream.append(sent)
        return sent

    def completed(self) -> list[Sent]:
        return self._take(lambda sent: sent.end.query())

    def finish(self) -> list[Sent]:
        return self._take(lambda sent: True)  # the end of the step waits for the device

    def _take(self, is_done: Callable[[Sent], bool]) -> list[Sent]:
        done = [sent for sent in self._on_stream if is_done(sent)]
        self._on_stream = [sent for sent in self._on_stream if sent not in done]
        return done

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        with self.device.communicating():
            tensors = [m.empty(self.device.torch_device) for m in meta.tensors]
            for tensor in tensors:
                _work(dist.irecv(in_a_row(tensor), source)).wait()
            return _OnStream(tensors, self.device.stamp())


class _OnStream:
    """A receive that the compute stream waits for, while the host goes on."""

    def __init__(self, tensors: list[torch.Tensor], arrived: torch.cuda.Event) -> None:
        self.tensors, self._arrived = tensors, arrived

    def wait(self) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._arrived)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        return self.tensors


def open_links(kind: str, device: Device, *, strict: bool = False) -> Links:
    """The links for a `DevicePlan` of this kind."""
    return (NcclLinks if kind == "cuda" else Links)(device, strict=strict)


def _work(posted: dist.Work | None) -> dist.Work:
    assert posted is not None, "this rank belongs to the default group"
    return posted


def _isend(row: torch.Tensor, to: int, tag: int) -> Any:
    try:
        return _group().send([row], to, tag)
    except RuntimeError as error:
        raise PeerLost(f"send to rank {to} failed: {error}") from error


def _irecv(row: torch.Tensor, source: int, tag: int) -> Any:
    try:
        return _group().recv([row], source, tag)
    except RuntimeError as error:
        raise PeerLost(f"receive from rank {source} failed: {error}") from error


def _group() -> dist.ProcessGroup:
    """The default group, spoken to without the detours of `dist.isend`, which double a transfer's cost."""
    group = dist.group.WORLD
    assert group is not None, "the workers' first job forms it"
    return group


def _wait_all(works: list[Any]) -> float:
    """Wait for transfers; the time at which the last was done, in ms."""
    for work in works:
        try:
            work.wait()  # as long as the group's timeout
        except RuntimeError as error:
            raise PeerLost(f"transfer failed: {error}") from error
    return now_ms()


def _receive_now(tensors: list[torch.Tensor], source: int, tag: int) -> float:
    return _wait_all([_irecv(in_a_row(t), source, tag) for t in tensors if t.numel()])

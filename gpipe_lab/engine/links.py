"""Real sends and receives between ranks.

Every transfer has its own tag under gloo, so that two stages may order micro-batches differently. A
send starts when the receiver has posted its receive (gloo, like NCCL, meets in the middle); neither end
waits for it in between. A send's tensors are kept until it is known to be done.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist

from ..plan.ops import RECEIVES, Op
from .failures import PeerLost
from .message import Message, MessageMeta, raw_bytes
from .streams import CudaDevice, Device, now_ms

_META_TAG = 1 << 20
_TAGS_PER_STAGE = 2


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


@dataclass
class Sent:
    """A send under way: `done` gives its stamp of completion."""

    op: Op
    start: Any
    message: Message  # keeps the tensors alive
    done: Future
    held: list[int] = field(default_factory=list)  # what the ledger is to release


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
        self.pending: deque[Sent] = deque()
        self._unwatched: list[tuple[Sent, list[Any], int]] = []

    def send(self, op: Op, message: Message, to: int, tag: int) -> Sent:
        start = self.device.stamp()
        if self.strict or self._staged:
            self.device.finish()
            done = self._thread("send", to).submit(self._send_now, message.tensors, to, tag)
            return self._under_way(Sent(op, start, message, done))
        works = [_isend(row, to, tag) for row in message.rows]
        sent = Sent(op, start, message, Future())
        self._unwatched.append((sent, works, to))
        return self._under_way(sent)

    def watch(self) -> None:
        """Have threads wait for the sends posted since: called when this one is about to wait or has time."""
        for sent, works, to in self._unwatched:
            self._thread("send", to).submit(_wait_and_tell, works, sent.done)
        self._unwatched.clear()

    def _under_way(self, sent: Sent) -> Sent:
        self.pending.append(sent)
        return sent

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        host = [m.empty(torch.device("cpu")) for m in meta.tensors]
        if self.strict or self.link_ms:
            done = self._thread("receive", source).submit(_receive_now, host, source, tag)
            return _Threaded(done, host, self.link_ms, self.device)
        return _Direct([_irecv(raw_bytes(t), source, tag) for t in host if t.numel()], host, self.device)

    def completed(self) -> list[Sent]:
        """The sends that are done since the last call; raises what went wrong in them."""
        done = [sent for sent in self.pending if sent.done.done()]
        for sent in done:
            self.pending.remove(sent)
            sent.done.result()
        return done

    def finish(self) -> list[Sent]:
        """Wait for all sends that are left."""
        left = list(self.pending)
        self.pending.clear()
        for sent in left:
            sent.done.result()
        return left

    def send_meta(self, meta: MessageMeta, to: int, tag: int) -> None:
        """Tell the receiving end what this and all later messages of the same signature look like."""
        data = cloudpickle.dumps(meta)  # a named tuple may be a notebook cell's own
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for t in (torch.tensor([payload.numel()]), payload):
            self._thread("meta", to).submit(_wait_all, [_isend(raw_bytes(t), to, _META_TAG + tag)])

    def receive_meta(self, source: int, tag: int) -> MessageMeta:
        size = torch.zeros(1, dtype=torch.int64)
        _wait_all([_irecv(raw_bytes(size), source, _META_TAG + tag)])
        payload = torch.empty(int(size), dtype=torch.uint8)
        _wait_all([_irecv(payload, source, _META_TAG + tag)])
        return pickle.loads(payload.numpy().tobytes())

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()

    def _thread(self, purpose: str, peer: int) -> ThreadPoolExecutor:
        queue = "all" if self.strict and purpose != "meta" else (purpose, peer)
        if queue not in self._threads:
            self._threads[queue] = ThreadPoolExecutor(1, thread_name_prefix=f"link-{queue}")
        return self._threads[queue]

    def _send_now(self, tensors: list[torch.Tensor], to: int, tag: int) -> float:
        return _wait_all([_isend(raw_bytes(t.cpu()), to, tag) for t in tensors if t.numel()])


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

    def send(self, op: Op, message: Message, to: int, tag: int) -> Sent:
        with self.device.communicating():
            start = self.device.stamp()
            for row in message.rows:
                row.record_stream(self.device.comm_stream)
                _work(dist.isend(row, to)).wait()  # holds the stream, not the host
            done: Future = _EventFuture(self.device.stamp())
        return self._under_way(Sent(op, start, message, done))

    def receive(self, meta: MessageMeta, source: int, tag: int) -> Incoming:
        with self.device.communicating():
            tensors = [m.empty(self.device.torch_device) for m in meta.tensors]
            for tensor in tensors:
                _work(dist.irecv(raw_bytes(tensor), source)).wait()
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


class _EventFuture(Future):
    """A future that is done when a GPU event is; its result is the event, a stamp."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def result(self, timeout: float | None = None) -> Any:
        return self._event


def open_links(kind: str, device: Device, *, strict: bool = False) -> Links:
    """The links for a `DevicePlan` of this kind."""
    return (NcclLinks if kind == "cuda" else Links)(device, strict=strict)


def _work(posted: dist.Work | None) -> dist.Work:
    assert posted is not None, "this rank belongs to the default group"
    return posted


def _isend(row: torch.Tensor, to: int, tag: int) -> Any:
    return _guarded(dist.isend, row, to, tag)


def _irecv(row: torch.Tensor, source: int, tag: int) -> Any:
    return _guarded(dist.irecv, row, source, tag)


def _guarded(post: Any, row: torch.Tensor, peer: int, tag: int) -> Any:
    try:
        return post(row, peer, tag=tag)
    except RuntimeError as error:
        raise PeerLost(f"transfer with rank {peer} failed: {error}") from error


def _wait_all(works: list[Any]) -> float:
    """Wait for transfers; the time at which the last was done, in ms."""
    for work in works:
        try:
            work.wait()  # as long as the group's timeout
        except RuntimeError as error:
            raise PeerLost(f"transfer failed: {error}") from error
    return now_ms()


def _wait_and_tell(works: list[Any], done: Future) -> None:
    try:
        done.set_result(_wait_all(works))
    except PeerLost as error:
        done.set_exception(error)


def _receive_now(tensors: list[torch.Tensor], source: int, tag: int) -> float:
    return _wait_all([_irecv(raw_bytes(t), source, tag) for t in tensors if t.numel()])

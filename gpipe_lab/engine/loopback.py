"""Ranks as threads of one process, over an emulated device that shows which of its rules is broken.

Computation is torch's on the CPU. What is emulated is all that goes wrong on GPUs unseen: streams, events,
transfers. One rank runs at a time and hands over where it waits; who is next, and which transfer takes place,
is drawn from a seed, so that a run can be repeated. Every stream keeps a vector clock: how much of each
other's work is known to lie behind it. A tensor that is used without an event between it and the stream that
works on it is then an error, whether or not this time the numbers were right.

- Transfers are matched by their order alone, and a rank's begin in the order in which it issues them. They
  take place late, with the sender's bytes of then.
- A receive buffer holds garbage until the compute stream has waited for its event.
- Memory is let go, and used by another stream, only as the allocator's rules for streams have it.
- Within a step the host waits for nothing, and fetches from the host only what is pinned.
- When all ranks wait, each is named with what it waits for.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.ops import Op
from .batch import Tree, map_tensors, tensors
from .device import Device, now_ms
from .transport import Ranks, Sent, StreamTransport

T = TypeVar("T")
GARBAGE = 0xFF  # NaN in every floating-point type, -1 as an integer


class BrokenRule(RuntimeError):
    """What would be wrong on a GPU, whether or not it shows there."""


class Hang(RuntimeError):
    """All ranks wait; the text says for what."""


class _Stopped(BaseException):
    """Ends a rank's thread when another has failed."""


class World:
    """The ranks of one process. With `may_wait` the host may wait within a step, as that of a paced run."""

    def __init__(self, num_ranks: int, *, seed: int = 0, may_wait: bool = False) -> None:
        self.num_ranks = num_ranks
        self.random = random.Random(seed)
        self.may_wait = may_wait
        self.error: BaseException | None = None
        self.boards = [Whereabouts() for _ in range(num_ranks)]
        self.transports = [LoopbackTransport(self, rank) for rank in range(num_ranks)]
        self.mail: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self.posted: list[deque[Transfer]] = [deque() for _ in range(num_ranks)]  # and not begun, in order
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._meetings: defaultdict[tuple[Ranks, int], dict[int, Any]] = defaultdict(dict)
        self._num_met: defaultdict[tuple[Ranks, int], int] = defaultdict(int)

    def run(self, program: Callable[[LoopbackTransport], T]) -> list[T]:
        """What `program` returns for each rank's transport; raises the first error of any rank."""
        found: dict[int, T] = {}

        def main(transport: LoopbackTransport) -> None:
            rank = transport.rank
            self._turns[rank].acquire()
            try:
                if self.error is None:
                    with _HostWaits(transport.device), _Accesses(transport.device):
                        found[rank] = program(transport)
            except _Stopped:
                pass
            except BaseException as error:  # told to whoever called `run`
                self.fail(error)
            self._hand_over()

        threads = [threading.Thread(target=main, args=(t,), daemon=True) for t in self.transports]
        self._waiting = {rank: (_always, "its start") for rank in range(self.num_ranks)}
        for thread in threads:
            thread.start()
        self._hand_over()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return [found[rank] for rank in range(self.num_ranks)]

    def fail(self, error: BaseException) -> None:
        """Note the first error; whoever waits is woken to end."""
        self.error = self.error or error

    def until(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Let others run until `condition`, for which this rank waits."""
        self._waiting[rank] = condition, what
        self._hand_over()
        self._turns[rank].acquire()
        if self.error is not None:
            raise _Stopped

    def pause(self, rank: int) -> None:
        """Perhaps let others run here."""
        self.until(rank, _always, "its turn")

    def meet(self, rank: int, ranks: Ranks | None, value: Any, what: str) -> list[Any]:
        """The values that `ranks` bring to their next meeting, in their order."""
        ranks = tuple(range(self.num_ranks)) if ranks is None else ranks
        number = self._num_met[ranks, rank]
        self._num_met[ranks, rank] += 1
        brought = self._meetings[ranks, number]
        brought[rank] = value
        self.until(rank, lambda: len(brought) == len(ranks), f"{what} with ranks {ranks}")
        return [brought[each] for each in ranks]

    def _hand_over(self) -> None:
        """Have some transfers take place, and wake the next rank."""
        while self.error is None and self._waiting:
            for transport in self.transports:
                transport.device.advance()
            ready = [rank for rank, (condition, _) in self._waiting.items() if condition()]
            possible = self._possible()
            if possible and (not ready or self.random.random() < 0.5):
                self._transfer(*self.random.choice(possible))
            elif ready:
                rank = self.random.choice(ready)
                del self._waiting[rank]
                self._turns[rank].release()
                return
            else:
                self.fail(Hang(self._standstill()))
        for rank in list(self._waiting):
            del self._waiting[rank]
            self._turns[rank].release()

    def _possible(self) -> list[tuple[Transfer, Transfer]]:
        """The transfers that can begin: each rank's first alone may, the strictest thing NCCL does."""
        firsts = [queue[0] for queue in self.posted if queue and queue[0].is_next]
        by_ends = {(end.rank, end.peer): end for end in firsts}
        pairs = [(end, by_ends.get((peer, rank))) for (rank, peer), end in by_ends.items() if rank < peer]
        return [(end, other) for end, other in pairs if other is not None]

    def _transfer(self, one: Transfer, other: Transfer) -> None:
        try:
            if one.sends == other.sends or one.buffer.size != other.buffer.size:
                raise BrokenRule(
                    "rule:   both ends of a link issue its transfers in the same order\n"
                    f"got:    {one} meets {other}\nwhere:  a link\nremedy: the order that gl.lower gives"
                )
            send, receive = (one, other) if one.sends else (other, one)
            receive.take(send.read(), send.stream)
            for end in (one, other):
                self.posted[end.rank].popleft()
                end.stream.step()
        except BrokenRule as error:
            self.fail(error)

    def _standstill(self) -> str:
        lines = [
            f"rank {rank} in {self.boards[rank].op or 'set-up'} waits for {what}"
            for rank, (_, what) in sorted(self._waiting.items())
        ]
        stuck = [str(queue[0]) for queue in self.posted if queue]
        return (
            "rule:   some rank can always go on\n"
            f"got:    {'; '.join(lines)}; not met: {', '.join(stuck) or 'no transfer'}\n"
            "where:  all ranks\nremedy: one order of transfers for all ranks, as gl.lower gives"
        )


class Whereabouts:
    """A rank's board: the operation it is in."""

    op: Op | None = None

    def mark(self, op: Op, *, waits: bool = False) -> None:
        self.op = op

    def clear(self) -> None:
        self.op = None


def _always() -> bool:
    return True


Clock = dict["EmulatedStream", int]  # how many of a stream's commands are known to have run


@dataclass(eq=False)
class Event:
    """A point of a stream, come to pass at `time_ms`."""

    clock: Clock | None = None
    time_ms: float = 0.0


@dataclass(eq=False)
class Buffer:
    """Memory that transfers use: whose it is since which of its commands, and what is under way there."""

    storage: weakref.ref
    address: int
    size: int
    owner: EmulatedStream
    since: int
    transfers: list[Transfer] = field(default_factory=list)  # that the compute stream has not waited for
    last_use: int = 0  # by the compute stream


class EmulatedStream:
    """Commands that run in order, when they can, and not when they are issued."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.clock: Clock = {self: 0}
        self.queue: deque[Transfer | tuple[str, Event]] = deque()
        self.num_issued = 0

    def record(self) -> Event:
        event = Event()
        self.issue(("record", event))
        return event

    def wait(self, event: Event) -> None:
        self.issue(("wait", event))

    def issue(self, command: Transfer | tuple[str, Event]) -> int:
        self.queue.append(command)
        self.num_issued += 1
        return self.num_issued

    def advance(self) -> None:
        """Run what can run without another rank."""
        while self.queue and not isinstance(command := self.queue[0], Transfer):
            kind, event = command
            if kind == "wait" and event.clock is None:
                return
            self.step()
            self.settle(kind, event)

    def step(self) -> None:
        self.queue.popleft()
        self.clock[self] += 1

    def settle(self, kind: str, event: Event) -> None:
        if kind == "record":
            event.clock, event.time_ms = dict(self.clock), now_ms()
        else:
            assert event.clock is not None
            self.learn(event.clock)

    def learn(self, clock: Clock) -> None:
        """All that lies behind `clock` lies behind this stream from now on."""
        for stream, count in clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def knows(self, stream: EmulatedStream, count: int) -> bool:
        return self.clock.get(stream, 0) >= count

    def __enter__(self) -> None:
        self.device.current.append(self)

    def __exit__(self, *error: object) -> None:
        self.device.current.pop()


class ComputeStream(EmulatedStream):
    """The rank's own thread: what is issued runs at once, after the rank has let others bring it about."""

    def issue(self, command: Transfer | tuple[str, Event]) -> int:
        assert not isinstance(command, Transfer)
        kind, event = command
        if kind == "wait" and event.clock is None:
            world = self.device.world
            world.until(self.device.rank, lambda: event.clock is not None, "a transfer")
        self.settle(kind, event)
        self.clock[self] += 1
        self.device.land()
        return self.clock[self]


@dataclass(eq=False)
class Transfer:
    """One end of a transfer: command number `number` of its stream."""

    rank: int
    peer: int
    sends: bool
    buffer: Buffer
    stream: EmulatedStream
    op: Op | None  # what the rank was in when it was issued
    number: int = 0
    arrived: bytes | None = None

    @property
    def is_next(self) -> bool:
        return bool(self.stream.queue) and self.stream.queue[0] is self

    def __str__(self) -> str:
        way = f"to rank {self.peer}" if self.sends else f"from rank {self.peer}"
        return f"rank {self.rank}'s {self.buffer.size} B {way}, issued in {self.op or 'set-up'}"

    def read(self) -> bytes:
        """The bytes that are there when the transfer takes place."""
        device = self.stream.device
        written = device.written.get(self.buffer.address, 0)
        if not self.stream.knows(device.compute, written):
            _broken("a message leaves once the compute stream has written it", self, "link.wait(made)")
        if self.buffer.storage() is None:
            _broken("a message is kept until it has left", self, "hold it until its event is waited for")
        return ctypes.string_at(self.buffer.address, self.buffer.size)

    def take(self, data: bytes, sender: EmulatedStream) -> None:
        if not self.stream.knows(self.buffer.owner, self.buffer.since):
            _broken(
                "memory is another stream's once that has waited for its owner", self, "link.wait(compute)"
            )
        self.arrived = data
        self.stream.learn(sender.clock)


def _broken(rule: str, where: object, remedy: str) -> NoReturn:
    raise BrokenRule(f"rule:   {rule}\ngot:    no event between the two\nwhere:  {where}\nremedy: {remedy}")


class EmulatedDevice(Device):
    """A device with streams of its own, computing on the host's processor."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.compute: ComputeStream = ComputeStream(self)
        self.stamp = self.compute.record  # type: ignore[assignment]
        self.streams: list[EmulatedStream] = []
        self.current: list[EmulatedStream] = [self.compute]
        self.written: dict[int, int] = {}  # by address: the compute stream's last command that wrote there
        self.buffers: dict[int, Buffer] = {}
        self.in_step = False
        self.host_memory: dict[int, torch.Tensor] = {}  # by address: a batch as it was given
        self._formed: set[int] = set()

    # What the engine asks of a device.

    def begin_step(self) -> None:
        self.in_step = True

    def times(self, stamps: Sequence[Any]) -> list[float]:
        self.check_may_wait("times")
        events = [stamp for stamp in stamps if isinstance(stamp, Event)]
        self.world.until(self.rank, lambda: all(e.clock is not None for e in events), "the device")
        return [stamp.time_ms if isinstance(stamp, Event) else stamp for stamp in stamps]

    def finish(self) -> None:
        self.check_may_wait("finish")

    def wait_for(self, event: Event) -> None:
        self.check_may_wait("wait_for")
        self.world.until(self.rank, lambda: event.clock is not None, "an event")

    def stream(self) -> EmulatedStream:
        self.streams.append(EmulatedStream(self))
        return self.streams[-1]

    def empty(self, num_bytes: int) -> torch.Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            ctypes.memset(flat.data_ptr(), GARBAGE, num_bytes)
            self._buffer(flat, self.current[-1])
        return flat

    def pin(self, tree: Tree) -> Tree:
        for tensor in tensors(tree):
            self.host_memory[tensor.data_ptr()] = tensor
        return map_tensors(torch.clone, tree)

    def place(self, tree: Tree) -> Tree:
        for tensor in tensors(tree):
            if self.in_step and tensor.numel() and tensor.data_ptr() in self.host_memory:
                _broken("within a step the device fetches what is pinned", "a batch", "pin before the step")
        return tree

    def copy_in(self, tree: Tree) -> Tree:
        return map_tensors(torch.clone, self.place(tree))

    # What the emulation keeps.

    def transfer(self, flat: torch.Tensor, peer: int, *, sends: bool) -> None:
        """Issue one end of a transfer on the current stream."""
        if self.in_step and peer not in self._formed:
            _broken("a link forms its communicator before the first step", f"rank {peer}", "open_links")
        self._formed.add(peer)
        address = flat.untyped_storage().data_ptr()
        buffer = self.buffers.get(address) or self._buffer(flat, self.compute)
        view = Buffer(buffer.storage, flat.data_ptr(), flat.nbytes, buffer.owner, buffer.since)
        stream = self.current[-1]
        end = Transfer(self.rank, peer, sends, view, stream, self.world.boards[self.rank].op)
        end.number = stream.issue(end)
        buffer.transfers.append(end)
        self.world.posted[self.rank].append(end)

    def _buffer(self, flat: torch.Tensor, owner: EmulatedStream) -> Buffer:
        storage = flat.untyped_storage()
        made = Buffer(weakref.ref(storage), storage.data_ptr(), storage.nbytes(), owner, owner.clock[owner])
        self.buffers[made.address] = made
        weakref.finalize(storage, self._let_go, made)
        return made

    def _let_go(self, buffer: Buffer) -> None:
        """The allocator has the memory back, to give it to work that its owner is given from now on."""
        self.buffers.pop(buffer.address, None)
        owner = buffer.owner
        open_ends = [end for end in buffer.transfers if not owner.knows(end.stream, end.number)]
        if open_ends or (owner is not self.compute and not owner.knows(self.compute, buffer.last_use)):
            where = open_ends[0] if open_ends else "a buffer of a link's own"
            try:
                _broken("memory is let go once its owner has waited for all who use it", where, "wait first")
            except BrokenRule as error:
                self.world.fail(error)  # a finaliser has nobody to raise to

    def land(self) -> None:
        """Put what has arrived where the compute stream may see it by now."""
        for buffer in list(self.buffers.values()):
            for end in buffer.transfers:
                if end.arrived is not None and self.compute.knows(end.stream, end.number):
                    ctypes.memmove(end.buffer.address, end.arrived, len(end.arrived))
            buffer.transfers = [
                end for end in buffer.transfers if not self.compute.knows(end.stream, end.number)
            ]

    def advance(self) -> None:
        for stream in self.streams:
            stream.advance()

    def use(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """The compute stream reads or writes a tensor."""
        address = tensor.untyped_storage().data_ptr()
        buffer = self.buffers.get(address)
        if buffer is not None:
            buffer.last_use = self.compute.clock[self.compute]
            for end in buffer.transfers:
                if writes and end.sends:
                    _broken("what is sent is not changed until it has left", end, "a copy, or wait first")
                if not end.sends:
                    _broken("what is received is read once its event is waited for", end, "wait first")

    def wrote(self, tensor: torch.Tensor) -> None:
        self.written[tensor.untyped_storage().data_ptr()] = self.compute.clock[self.compute]

    def check_may_wait(self, what: str) -> None:
        if self.in_step and not self.world.may_wait:
            op = self.world.boards[self.rank].op
            raise BrokenRule(
                "rule:   the host waits for nothing within a step\n"
                f"got:    {what}\nwhere:  {op} on rank {self.rank}\nremedy: read it after the step"
            )


_WAITING_FUNCTIONS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
}
_WAITING_OPERATIONS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}


class _HostWaits(TorchFunctionMode):
    """Refuses, within a step, what would wait for the numbers of a tensor."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WAITING_FUNCTIONS:
            self._device.check_may_wait(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Accesses(TorchDispatchMode):
    """Tells the device what its compute stream reads and writes."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device, schema = self._device, func._schema
        if schema.name in _WAITING_OPERATIONS:
            device.check_may_wait(schema.name)
        for value, argument in zip(args, schema.arguments, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _in(value):
                device.use(tensor, writes=is_written)
        compute = device.compute
        compute.clock[compute] += 1
        result = func(*args, **(kwargs or {}))
        returned = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
        for value, declared in zip(returned, schema.returns, strict=False):
            if declared.alias_info is None or declared.alias_info.is_write:
                for tensor in _in(value):
                    device.wrote(tensor)
        return result


def _in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in an argument of an operation."""
    values: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    for each in values:
        if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.device.type == "cpu":
            yield each


class LoopbackTransport(StreamTransport):
    """The engine's own transport over streams, for a rank that is a thread."""

    device: EmulatedDevice

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(EmulatedDevice(world, rank), rank, world.num_ranks)
        self.world = world
        self.num_heard = 0  # values that the host has waited for

    def _put(self, flat: torch.Tensor, to: int) -> None:
        self.device.transfer(flat, to, sends=True)
        self.world.pause(self.rank)

    def _take(self, flat: torch.Tensor, source: int) -> None:
        self.device.transfer(flat, source, sends=False)
        self.world.pause(self.rank)

    def finish(self) -> list[Sent]:
        self.device.in_step = False  # all of it is issued
        return super().finish()

    def tell(self, value: Any, to: int, tag: int) -> None:
        self.world.mail[self.rank, to, tag].append(value)

    def hear(self, source: int, tag: int) -> Any:
        box = self.world.mail[source, self.rank, tag]
        self.num_heard += 1
        self.world.until(self.rank, lambda: bool(box), f"word from rank {source}")
        return box.popleft()

    def gather(self, value: Any, ranks: Ranks | None = None) -> list[Any]:
        return self.world.meet(self.rank, ranks, value, "a gathering")

    def _all_reduce(self, flat: torch.Tensor, ranks: Ranks | None) -> None:
        parts = self.world.meet(self.rank, ranks, flat.clone(), "a sum")
        flat.zero_()
        for part in parts:
            flat.add_(part)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        values = self.world.meet(self.rank, ranks, tensor.clone(), "a broadcast")
        tensor.copy_(values[ranks.index(source)])

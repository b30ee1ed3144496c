"""An emulated device: streams, events and memory that know what has been waited for, and what has not.

Computation is torch's on the CPU, on the thread of its rank. Every stream keeps a vector clock: how much of
each other's work is known to lie behind it. A tensor that is used without an event between it and the stream
that works on it is then an error, whether or not this time the numbers were right.

- A transfer takes place late, with the sender's bytes of then.
- A receive buffer holds garbage until the compute stream has waited for its event.
- Memory is let go, and used by another stream, only as the allocator's rules for streams have it.
- Within a step the host waits for nothing, and fetches from the host only what is pinned.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.ops import Op
from .batch import Tree, map_tensors, tensors
from .device import Device, now_ms

if TYPE_CHECKING:
    from .loopback import World

GARBAGE = 0xFF  # NaN in every floating-point type, -1 as an integer


class BrokenRule(RuntimeError):
    """What would be wrong on a GPU, whether or not it shows there."""


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
            broken("a message leaves once the compute stream has written it", self, "link.wait(made)")
        if self.buffer.storage() is None:
            broken("a message is kept until it has left", self, "hold it until its event is waited for")
        return ctypes.string_at(self.buffer.address, self.buffer.size)

    def take(self, data: bytes, sender: EmulatedStream) -> None:
        if not self.stream.knows(self.buffer.owner, self.buffer.since):
            broken(
                "memory is another stream's once that has waited for its owner", self, "link.wait(compute)"
            )
        self.arrived = data
        self.stream.learn(sender.clock)


def broken(rule: str, where: object, remedy: str) -> NoReturn:
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
                broken("within a step the device fetches what is pinned", "a batch", "pin before the step")
        return tree

    def copy_in(self, tree: Tree) -> Tree:
        return map_tensors(torch.clone, self.place(tree))

    # What the emulation keeps.

    def transfer(self, flat: torch.Tensor, peer: int, *, sends: bool) -> None:
        """Issue one end of a transfer on the current stream."""
        if self.in_step and peer not in self._formed:
            broken("a link forms its communicator before the first step", f"rank {peer}", "open_links")
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
                broken("memory is let go once its owner has waited for all who use it", where, "wait first")
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
                    broken("what is sent is not changed until it has left", end, "a copy, or wait first")
                if not end.sends:
                    broken("what is received is read once its event is waited for", end, "wait first")

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


class HostWaits(TorchFunctionMode):
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


class Accesses(TorchDispatchMode):
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

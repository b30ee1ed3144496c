"""Ranks as threads of one process, over emulated devices that show which of a GPU's rules is broken.

One rank runs at a time and hands over where it waits; who is next, and which transfer takes place, is drawn
from a seed, so that a run can be repeated. Transfers are matched by their order alone, and a rank's begin in
the order in which it issues them. When all ranks wait, each is named with what it waits for.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..plan.ops import Op
from .emulated import Accesses, BrokenRule, EmulatedDevice, HostWaits, Transfer
from .transport import Ranks, Sent, StreamTransport

T = TypeVar("T")


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
                    with HostWaits(transport.device), Accesses(transport.device):
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

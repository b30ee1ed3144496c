"""The driver's side: worker processes, calls on them, and what is noticed when one fails or hangs."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

from ..engine.device import DevicePlan
from .board import ASK_STACK, SharedBoard, Watchdog
from .failures import Failure, RankFailed, Replies, RunStopped
from .forkserver import LOOPBACK, hidden_main, start_forkserver
from .pickling import pack_jobs
from .processes import WORKERS_VARIABLE, kill_group, kill_what_was_started_by
from .worker import Seat, main

STACK_WAIT_S = 1.0
GRACE_S = 0.5  # from the end of its pipe to SIGKILL


class Message(NamedTuple):
    """What a rank says: "result", "failure", "output", "message", "stack", or "death" with its exit code."""

    rank: int
    kind: str
    content: Any


OnMessage = Callable[[int, Any], None]  # rank, what the rank reported
OnOutput = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", whole lines


def print_tagged(rank: int, stream: str, lines: str) -> None:
    """Print what a rank printed, each line behind its rank: `[rank 2] text`."""
    tagged = "\n".join(f"[rank {rank}] {line}" for line in lines.split("\n"))
    print(tagged, file=getattr(sys, stream))


class Workers:
    """A set of worker processes with a pipe to each; it is used up by its first failure, never repaired.

    They end with `end()`, with this object, or with this process, whichever comes first, however it ends.
    """

    def __init__(self, device_plan: DevicePlan, stop: Connection) -> None:
        """stop: what ends a run, as `RunStopped`, as soon as it can be read."""
        self._device_plan = device_plan
        self._stop = stop
        self._context = start_forkserver()
        self.rendezvous = tempfile.mkdtemp(prefix="rendezvous-", dir=util.get_temp_dir())
        self.board = SharedBoard(self.rendezvous, self.num_ranks)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self.end = weakref.finalize(self, _end, self._pipes, self._processes, self.rendezvous, os.getpid())
        self.end.atexit = False  # a call may be going on in a thread; the lab ends that first

    @property
    def num_ranks(self) -> int:
        return len(self._device_plan.device_names)

    def start(self) -> None:
        """Start every process; each does its first job as soon as it is up, so none is waited for here."""
        for rank in range(self.num_ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        self._pipes.append(ours)  # first, so that an interrupt leaves no process out of reach
        environment = _environment(rank, self.num_ranks, self.rendezvous)
        seat = Seat(rank, self._device_plan, self.board.path, theirs, environment, self.rendezvous)
        process = self._context.Process(target=main, args=(seat,), name=f"rank {rank}", daemon=True)
        with hidden_main():
            process.start()
        theirs.close()
        self._processes.append(process)

    def form_group(self, job: Callable[..., None]) -> None:
        """Have every rank do `job` with the path of a rendezvous that nobody has used."""
        path = os.path.join(self.rendezvous, f"group{next(_serial)}")
        self.run(pack_jobs(job, [(path,)] * self.num_ranks))

    def run(
        self,
        jobs: list[bytes],
        *,
        on_message: OnMessage | None = None,
        on_output: OnOutput = print_tagged,
        timeout: float | None = None,
        watchdog_s: float | None = None,
    ) -> list[Any]:
        """Send each rank its job and listen until all have replied or one has failed; the results by rank."""
        replies = Replies(self.num_ranks, self.board, timeout)
        watchdog = Watchdog(self.board, watchdog_s)
        for rank, job in enumerate(jobs):
            self.send(rank, job)
        while not replies.complete():
            for message in self.receive(_sooner(replies, watchdog)):
                match message.kind:
                    case "output":
                        on_output(message.rank, *message.content)
                    case "message":
                        if on_message is not None:
                            on_message(message.rank, pickle.loads(message.content))
                    case "result":
                        replies.add_result(message.rank, message.content)
                    case "failure":
                        replies.add_failure(message.content)
                        for rank in replies.missing:  # whether one of them is its cause
                            self.send(rank, ASK_STACK)
                    case "death":
                        replies.add_failure(Failure.of_death(message.rank, message.content))
            if self._stop.poll():
                raise RunStopped("the run was stopped; the next one starts on fresh workers")
            if suspects := watchdog.suspects(replies.missing):
                reason = f"it hangs: no rank has moved for {watchdog_s:g} s"
                raise self._hanging(suspects, reason)
        return replies.by_rank()

    def _hanging(self, suspects: list[int], reason: str) -> RankFailed:
        """The first of the suspects that does not even answer, else the first."""
        stacks = {}
        for rank in suspects:
            stacks[rank] = self.stack_of(rank)
            if stacks[rank] is None:
                break
        blamed = rank if stacks[rank] is None else suspects[0]
        told = stacks[blamed] or "(no stack: the rank does not answer)"
        return RankFailed(blamed, self.board.read(blamed), reason, told)

    def intact(self) -> bool:
        """Whether every process is still there."""
        return not wait([process.sentinel for process in self._processes], timeout=0)

    def send(self, rank: int, job: bytes) -> None:
        """Queue a job; a rank that is gone says so through `receive`."""
        with suppress(OSError):
            self._pipes[rank].send_bytes(job)

    def stack_of(self, rank: int) -> str | None:
        """Where a rank's main thread is, asked of its listening thread; None where nothing answers.

        A busy C call may hold that up, and a frozen process never answers.
        """
        self.send(rank, ASK_STACK)
        deadline = time.monotonic() + STACK_WAIT_S
        while self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            message = self._read(rank)
            if message.kind == "stack":
                return str(message.content)
            if message.kind == "death":
                break
        return None

    def receive(self, timeout: float | None) -> list[Message]:
        """Wait until a rank speaks or dies, the run is stopped, or `timeout` seconds have passed."""
        sentinels = [process.sentinel for process in self._processes]
        ready = wait([self._stop, *self._pipes, *sentinels], timeout)
        messages: list[Message] = []
        for rank, (pipe, sentinel) in enumerate(zip(self._pipes, sentinels, strict=True)):
            if sentinel in ready:
                messages += self._last_words(rank)
            elif pipe in ready:
                messages.append(self._read(rank))
        return messages

    def _read(self, rank: int) -> Message:
        try:
            return Message(rank, *self._pipes[rank].recv())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(GRACE_S)
            return Message(rank, "death", process.exitcode)

    def _last_words(self, rank: int) -> Iterator[Message]:
        """All that a dead rank still has in its pipe, and then its death."""
        while self._pipes[rank].poll():
            message = self._read(rank)
            if message.kind == "death":
                break
            yield message
        yield Message(rank, "death", self._processes[rank].exitcode)


def _end(pipes: list[Connection], processes: list[BaseProcess], rendezvous: str, owner: int) -> None:
    """Dismiss the workers: the end of its pipe ends each at once, and SIGKILL those that it did not reach."""
    if os.getpid() != owner:  # a fork of the driver inherits this object, not the workers
        return
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    crashed = [process for process in processes if process.exitcode != 0]
    for process in crashed:  # it could not end what it had started
        kill_group(cast(int, process.pid))
        process.kill()
        process.join()
    if crashed:
        kill_what_was_started_by(rendezvous)
    for process in processes:
        process.close()
    shutil.rmtree(rendezvous, ignore_errors=True)


def _environment(rank: int, num_ranks: int, workers: str) -> dict[str, str]:
    """The driver's environment as it is now, with what a rank needs; nothing listens off loopback."""
    defaults = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "KINETO_LOG_LEVEL": "99",  # or torch's profiler tells of each of its stages
    }
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    mark = {WORKERS_VARIABLE: workers}
    interfaces = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    return {**defaults, **os.environ, **ours, **mark, **interfaces}


def _sooner(*watched: Replies | Watchdog) -> float | None:
    patience = [p for p in (w.patience() for w in watched) if p is not None]
    return min(patience, default=None)


_serial = itertools.count()

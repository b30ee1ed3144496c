"""One set of worker processes, from their start to their end, as the driver holds them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.devices import DevicePlan
from .board import Board
from .role import may_have_labs
from .watchdog import ASK_STACK

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

PRELOAD = "gpipe_lab.lab.preload"
SCRATCH_VARIABLE = "GPIPE_LAB_SCRATCH"
STACK_WAIT_S = 1.0
GRACE_S = 0.5  # from the end of its pipe to SIGKILL

_starting = threading.RLock()  # the main module and the environment are changed while a process starts


class Message(NamedTuple):
    """What a rank says: "result", "failure", "output", "message", or "death" with its exit code."""

    rank: int
    kind: str
    content: Any


class Workers:
    """A set of worker processes with a pipe to each; it is used up by its first failure, never repaired.

    They end with `end()`, with this object, or with this process, whichever comes first, however it ends.
    """

    def __init__(self, device_plan: DevicePlan) -> None:
        self._device_plan = device_plan
        self._context = start_forkserver()
        self.board = Board(self.num_ranks, self._context)
        self.rendezvous = tempfile.mkdtemp(prefix="rendezvous-", dir=util.get_temp_dir())
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
        # Imported here because it brings torch, which the forkserver is importing in the meantime.
        from .worker import Seat, main

        ours, theirs = self._context.Pipe()
        self._pipes.append(ours)  # first, so that an interrupt leaves no process out of reach
        environment = _environment(rank, self.num_ranks)
        seat = Seat(rank, self._device_plan, self.board.of_rank(rank), theirs, environment, self.rendezvous)
        process = self._context.Process(target=main, args=(seat,), name=f"rank {rank}", daemon=True)
        with _hidden_main():
            process.start()
        theirs.close()
        self._processes.append(process)

    def intact(self) -> bool:
        """Whether every process is still there."""
        return not wait([process.sentinel for process in self._processes], timeout=0)

    def send(self, rank: int, job: bytes) -> None:
        """Queue a job; a rank that is gone says so through `receive`."""
        with suppress(OSError):
            self._pipes[rank].send_bytes(job)

    def stack_of(self, rank: int) -> str:
        """Where a rank's main thread is; asked of its listening thread, which a busy C call may hold up."""
        self.send(rank, ASK_STACK)
        deadline = time.monotonic() + STACK_WAIT_S
        while self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            message = self._read(rank)
            if message.kind == "stack":
                return str(message.content)
            if message.kind == "death":
                break
        return "(no stack: the rank does not answer)"

    def receive(self, also: Connection, timeout: float | None) -> list[Message]:
        """Wait until a rank speaks or dies, `also` can be read, or `timeout` seconds have passed."""
        sentinels = [process.sentinel for process in self._processes]
        ready = wait([also, *self._pipes, *sentinels], timeout)
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
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()
    shutil.rmtree(rendezvous, ignore_errors=True)


def start_forkserver() -> ForkServerContext | SpawnContext:
    """The context that workers start from; its forkserver begins to import torch in the background.

    Where a platform has no forkserver, workers are spawned, which is slower and otherwise the same.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    if not may_have_labs():  # a rank may touch gl.Lab
        return context
    changes = {
        SCRATCH_VARIABLE: _own_temp_dir(),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONSAFEPATH": "1",  # or a file in the working folder could stand in for a module of the same name
        # Before Python 3.12 a forkserver does not get sys.path.
        "PYTHONPATH": os.pathsep.join(filter(None, [_package_root(), os.environ.get("PYTHONPATH")])),
    }
    with _hidden_main(), _changed_environment(changes):
        context.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    return context


_temp_dir_owner: int | None = None


def _own_temp_dir() -> str:
    """multiprocessing's folder of this process, for the forkserver to remove in the end.

    A process that multiprocessing itself has made is given its parent's, which the parent still needs.
    """
    global _temp_dir_owner
    if _temp_dir_owner != os.getpid():
        if multiprocessing.parent_process() is not None:
            vars(multiprocessing.current_process())["_config"].pop("tempdir", None)
        _temp_dir_owner = os.getpid()
    return util.get_temp_dir()


def _package_root() -> str:
    return str(Path(__file__).resolve().parents[2])


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    """The driver's environment as it is now, with what a rank needs; nothing listens off loopback."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    return {**defaults, **os.environ, **ours, "GLOO_SOCKET_IFNAME": loopback}


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in its children."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _starting:
        hidden: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main.pop("__file__", None)
        main["__spec__"] = None
        try:
            yield
        finally:
            main.pop("__spec__")
            main.update(hidden)


@contextmanager
def _changed_environment(changes: dict[str, str]) -> Iterator[None]:
    with _starting:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

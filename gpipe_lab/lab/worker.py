"""What runs in a worker process: jobs on the main thread, and a listener that ends the process when told."""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..engine.device import DevicePlan, take_device
from ..engine.rank_pipeline import StepRefused
from .board import ASK_STACK, RankBoard, main_thread_stack
from .failures import Failure, Refused
from .pickling import dumps

_is_rank = False


def mark_as_rank() -> None:
    """Called in a worker: it makes no labs, and other processes it may."""
    global _is_rank
    _is_rank = True
    vars(multiprocessing.current_process())["_config"]["daemon"] = False


def may_have_labs() -> bool:
    """Whether labs can be made in this process: not in a rank, nor in what ends without notice."""
    return not (_is_rank or multiprocessing.current_process().daemon)


# The driver sees every death itself, so a transfer may take as long as a slow step or a breakpoint needs.
GROUP_TIMEOUT = timedelta(hours=12)
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


@dataclass(frozen=True)
class Seat:
    """What a worker is given when it starts."""

    rank: int
    device_plan: DevicePlan
    board: RankBoard
    pipe: Connection
    environment: dict[str, str]
    rendezvous: str  # a private folder that lives as long as the set of workers


@dataclass
class RankContext:
    """The first argument of every job: which rank this is, and what it keeps.

    `state` survives from job to job until the workers are replaced. `groups` holds whatever belongs to
    the default process group, such as groups made from it, and is emptied when that is replaced.
    `board.mark(op)` says which operation the rank is in; `report(value)` sends the driver a message.
    `scratch` is a private folder that goes with the workers, however they end.
    """

    rank: int
    num_ranks: int
    device: str  # as torch names it
    device_plan: DevicePlan
    board: RankBoard
    report: Callable[[Any], None]
    scratch: str
    state: dict[Any, Any] = field(default_factory=dict)
    groups: dict[Any, Any] = field(default_factory=dict)


class Outbox:
    """The worker's end of the pipe for writing, shared by all its threads."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        message = pickle.dumps((kind, content))
        try:
            with self._lock:
                self._seat.pipe.send_bytes(message)
        except OSError:  # the driver is gone or has dismissed this worker
            _leave(self._seat)

    def report(self, value: Any) -> None:
        self.send("message", dumps(value))


class LineStream(io.TextIOBase):
    """Stands in for sys.stdout or sys.stderr: whole lines travel to the driver, which tags them by rank."""

    encoding = "utf-8"

    def __init__(self, name: str, outbox: Outbox) -> None:
        self._name = name
        self._outbox = outbox
        self._pending = ""
        self._lock = threading.RLock()  # a finaliser that prints may run within a print

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._pending = (self._pending + text).rpartition("\n")
            if newline:
                self._outbox.send("output", (self._name, lines))
        return len(text)

    def end_line(self) -> None:
        if self._pending:
            self.write("\n")


def main(seat: Seat) -> None:
    """Run jobs until the driver closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_children()
    gc.freeze()  # what is imported is no garbage: to look through it takes half a second, amid a long step
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    outbox = Outbox(seat)
    threading.Thread(target=_listen, args=(seat, jobs, outbox), daemon=True).start()
    os.environ.clear()
    os.environ.update(seat.environment)
    streams = LineStream("stdout", outbox), LineStream("stderr", outbox)
    sys.stdout, sys.stderr = streams
    plan = seat.device_plan
    num_ranks, device = len(plan.device_names), plan.device_names[seat.rank]
    context = RankContext(seat.rank, num_ranks, device, plan, seat.board, outbox.report, seat.rendezvous)
    while True:
        kind, content = _run(context, jobs.get())
        for stream in streams:
            stream.end_line()
        outbox.send(kind, content)


def _listen(seat: Seat, jobs: queue.SimpleQueue[bytes], outbox: Outbox) -> None:
    """Queue jobs, and say where the main thread is when asked.

    Whatever ends the listening, an ended pipe above all, ends the process at once.
    """
    try:
        while True:
            received = seat.pipe.recv_bytes()
            if received == ASK_STACK:
                outbox.send("stack", main_thread_stack())
            else:
                jobs.put(received)
    except (EOFError, OSError):
        pass  # the driver closed the pipe, or died
    finally:
        _leave(seat)


def _leave(seat: Seat) -> NoReturn:
    """End the process, whatever its main thread hangs in, with its children and its set's folder."""
    try:
        for child in multiprocessing.active_children():
            child.kill()
        shutil.rmtree(seat.rendezvous, ignore_errors=True)
    finally:
        os._exit(0)


def _allow_children() -> None:
    """Let a program start processes, as a DataLoader does: multiprocessing forbids that in daemons.

    They end with this process. It kills them as it leaves; should it be killed itself, the kernel ends those
    that it has forked (on Linux; elsewhere a DataLoader's own notice within 5 s).
    """
    mark_as_rank()
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    forking = [0]

    def note_parent() -> None:
        forking[0] = os.getpid()

    def end_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forking[0]:  # it ended before the call
            os._exit(0)

    os.register_at_fork(before=note_parent, after_in_child=end_with_parent)


def _run(context: RankContext, job: bytes) -> tuple[str, Any]:
    """Do one job; the reply is ("result", bytes) or ("failure", Failure)."""
    try:
        cwd, sys_path, dtype, payload = pickle.loads(job)
        context.board.clear()
        _reset_globals(cwd, sys_path, dtype)
        function, args = pickle.loads(payload)
        try:
            result = function(context, *args)
        except StepRefused as refused:
            result = Refused.of(context.rank, refused)
        data = _pickle_result(context.rank, result)
    except BaseException as error:  # SystemExit too: a program that exits has not returned a result
        return "failure", Failure.of_exception(context.rank, error)
    context.board.clear()
    return "result", data


def _reset_globals(cwd: str | None, sys_path: list[str], dtype: torch.dtype | None) -> None:
    """Undo what an earlier job may have set, and take on what the driver has."""
    if cwd is not None:
        os.chdir(cwd)
    sys.path[:] = sys_path
    torch.set_default_dtype(dtype or torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


def _pickle_result(rank: int, result: Any) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        what = f"the result of rank {rank} ({type(result).__name__}) cannot be pickled"
        raise TypeError(f"{what}: {error}; return tensors or plain values") from error


def join(context: RankContext, store_path: str) -> None:
    """The first job of every worker."""
    take_device(context.device_plan, context.rank)
    form_group(context, store_path)


def form_group(context: RankContext, store_path: str) -> None:
    """A job: give the rank a fresh default process group, ending the one it may have."""
    context.groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        context.device_plan.backend,
        store=dist.FileStore(store_path, context.num_ranks),
        rank=context.rank,
        world_size=context.num_ranks,
        timeout=GROUP_TIMEOUT,
    )


def run_program(context: RankContext, program: Callable[..., Any], args: tuple) -> tuple[Any, bool]:
    """A job: `program(context, *args)`, and whether it used the process group."""
    before = _group_fingerprint(context)
    result = program(context, *args)
    return result, before is None or _group_fingerprint(context) != before


def _group_fingerprint(context: RankContext) -> tuple | None:
    """Changes when the default group carries a message, is replaced, or has another made from it.

    None where that cannot be known: only gloo counts its messages.
    """
    if not dist.is_initialized() or context.device_plan.backend != "gloo":
        return None
    group = dist.group.WORLD
    assert group is not None
    count = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return id(group), count, dist.distributed_c10d._world.group_count

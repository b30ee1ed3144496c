"""The driver's side: worker processes, calls on them, and what is noticed when one fails or hangs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.device import DevicePlan
from ..plan.errors import InputError
from .board import ASK_STACK, Board, Watchdog
from .failures import Failure, PipelineLost, RankFailed, RunStopped, describe
from .pickling import dumps
from .worker import may_have_labs

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
    return {**defaults, **os.environ, **ours, "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


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


CAUSE_WAIT_S = 1.0  # a rank that lost its peer waits this long to be explained by the peer's own failure
RENEW_LIMIT_S = 2.0

OnMessage = Callable[[int, Any], None]  # rank, what the rank reported
OnOutput = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", whole lines


def print_tagged(rank: int, stream: str, lines: str) -> None:
    """Print what a rank printed, each line behind its rank: `[rank 2] text`."""
    tagged = "\n".join(f"[rank {rank}] {line}" for line in lines.split("\n"))
    print(tagged, file=getattr(sys, stream))


class WorkerPool:
    """Worker processes, one for each rank, that stay alive from call to call.

    A call that fails, is stopped, interrupted, or takes too long ends all workers, and the next call begins
    with fresh ones (about 0.1 s). So does a call that finds a worker gone. `generation` counts the sets that
    have ended.
    One call at a time; `stop` may come from any thread.
    """

    def __init__(self, device_plan: DevicePlan) -> None:
        self.device_plan = device_plan
        self.generation = 0
        self._workers: Workers | None = None
        self._group_is_used = False
        self._stop_reader, self._stop_writer = Pipe(duplex=False)
        self._stop_lock = threading.Lock()
        self._calling = False
        with self._stoppable():
            self._ready_workers()

    @property
    def num_ranks(self) -> int:
        return len(self.device_plan.device_names)

    def call(
        self,
        function: Callable[..., Any],
        args_by_rank: Sequence[tuple],
        *,
        on_message: OnMessage | None = None,
        on_output: OnOutput = print_tagged,
        timeout: float | None = None,
        watchdog_s: float | None = None,
        generation: int | None = None,
    ) -> list[Any]:
        """Run `function(context, *args_by_rank[rank])` on every rank; the results by rank.

        Raises `RankFailed` for the first rank that raises, dies, or stays in one operation of an engine's
        run for `watchdog_s` seconds while no other rank moves; `RunStopped` after `stop()`,
        `TimeoutError` after `timeout` seconds, `InputError` for a function or arguments that cannot be
        pickled, and `PipelineLost` where `generation` is given and the workers are of a later one.
        """
        jobs = _pack_jobs(function, args_by_rank)
        with self._stoppable():
            workers = self._ready_workers()
            if generation is not None and generation != self.generation:
                raise PipelineLost("the workers that held this pipeline's weights are gone")
            replies = self._run(workers, jobs, on_message, on_output, timeout, watchdog_s)
        return replies.by_rank()

    def renew_group(self) -> None:
        """Give the ranks a fresh default process group before their next job."""
        self._group_is_used = True

    def replace(self, device_plan: DevicePlan) -> None:
        """End all workers and start new ones on `device_plan`."""
        self.close()
        self.device_plan = device_plan
        with self._stoppable():
            self._ready_workers()

    def stop(self) -> None:
        """End the call that is in progress in another thread, which raises `RunStopped`; else do nothing."""
        with self._stop_lock:
            if self._calling and not self._stop_reader.poll():
                self._stop_writer.send_bytes(b"stop")

    def close(self) -> None:
        """End all workers."""
        if self._workers is not None:
            self._workers.end()
            self.generation += 1
        self._workers = None

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Within, `stop` is heard; whatever goes wrong ends all workers."""
        with self._stop_lock:
            self._calling = True
        try:
            yield
        except PipelineLost:  # the workers themselves are fine
            raise
        except BaseException:
            self.close()
            raise
        finally:
            with self._stop_lock:
                self._calling = False
                if self._stop_reader.poll():
                    self._stop_reader.recv_bytes()

    def _ready_workers(self) -> Workers:
        """The workers, in a process group that nobody has used: started or renewed where need be."""
        from .worker import form_group, join

        workers = self._workers
        if workers is not None and workers.intact() and self._group_is_used:
            try:
                self._form(workers, form_group, RENEW_LIMIT_S)
            except TimeoutError:  # something left unfinished holds the old group
                self.close()
        if workers is None or self._workers is None or not workers.intact():
            self.close()
            self._workers = workers = Workers(self.device_plan)
            workers.start()
            self._form(workers, join, None)
        return workers

    def _form(self, workers: Workers, job: Callable[..., None], timeout: float | None) -> None:
        path = os.path.join(workers.rendezvous, f"group{next(_serial)}")
        self._run(workers, _pack_jobs(job, [(path,)] * self.num_ranks), timeout=timeout)
        self._group_is_used = False

    def _run(
        self,
        workers: Workers,
        jobs: list[bytes],
        on_message: OnMessage | None = None,
        on_output: OnOutput = print_tagged,
        timeout: float | None = None,
        watchdog_s: float | None = None,
    ) -> Replies:
        """Send a job to every rank and listen until each has replied or one has failed."""
        replies = Replies(workers.num_ranks, workers.board, timeout)
        watchdog = Watchdog(workers.board, watchdog_s)
        for rank, job in enumerate(jobs):
            workers.send(rank, job)
        while not replies.complete():
            for message in workers.receive(self._stop_reader, _sooner(replies, watchdog)):
                if message.kind == "output":
                    on_output(message.rank, *message.content)
                elif message.kind == "message":
                    if on_message is not None:
                        on_message(message.rank, pickle.loads(message.content))
                else:
                    replies.add(message)
            if self._stop_reader.poll():
                raise RunStopped("the run was stopped; the next one starts on fresh workers")
            blamed = watchdog.blamed(replies.missing)
            if blamed is not None:
                reason = f"it hangs: no rank has moved for {watchdog_s:g} s"
                raise RankFailed(blamed, workers.board.read(blamed), reason, workers.stack_of(blamed))
        return replies


class Replies:
    """The replies to one call, and which rank to blame where one fails."""

    def __init__(self, num_ranks: int, board: Board, timeout: float | None) -> None:
        self._board = board
        self.missing = set(range(num_ranks))
        self._results: dict[int, bytes] = {}
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._consequence: Failure | None = None  # the first one
        self._blame_by: float | None = None

    def add(self, message: Message) -> None:
        """Take a reply; raises `RankFailed` for a failure that cannot be the consequence of another."""
        self.missing.discard(message.rank)
        if message.kind == "result":
            self._results[message.rank] = message.content
            return
        died = message.kind == "death"
        failure = Failure.of_death(message.rank, message.content) if died else message.content
        if not failure.is_consequence:
            raise self._error(failure)
        if self._consequence is None:
            self._consequence = failure
            self._blame_by = time.monotonic() + CAUSE_WAIT_S

    def complete(self) -> bool:
        """Whether every rank has its result; raises once there is no more to wait for."""
        now = time.monotonic()
        if self._consequence and (not self.missing or now > (self._blame_by or now)):
            raise self._error(self._consequence)
        if self.missing and self._deadline is not None and now > self._deadline:
            late = ", ".join(map(self._whereabouts, sorted(self.missing)))
            raise TimeoutError(f"not finished in time: {late}; the next call starts on fresh workers")
        return not self.missing

    def patience(self) -> float | None:
        """Seconds until `complete` must be asked again; None for as long as it takes."""
        ends = [end for end in (self._deadline, self._blame_by) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def by_rank(self) -> list[Any]:
        return [_unpickle_result(rank, self._results[rank]) for rank in sorted(self._results)]

    def _error(self, failure: Failure) -> RankFailed:
        return failure.error(self._board.read(failure.rank))

    def _whereabouts(self, rank: int) -> str:
        op = self._board.read(rank)
        return f"rank {rank} in {describe(op)}" if op else f"rank {rank}"


def _sooner(*watched: Replies | Watchdog) -> float | None:
    patience = [p for p in (w.patience() for w in watched) if p is not None]
    return min(patience, default=None)


_serial = itertools.count()


def _pack_jobs(function: Callable[..., Any], args_by_rank: Sequence[tuple]) -> list[bytes]:
    """A job for every rank; ranks with the very same arguments share one."""
    torch = sys.modules.get("torch")  # where the driver has not imported it, its default dtype is torch's own
    dtype = torch.get_default_dtype() if torch else None
    packed: dict[tuple[int, ...], bytes] = {}
    jobs = []
    for rank, args in enumerate(args_by_rank):
        key = tuple(map(id, args))
        if key not in packed:
            packed[key] = pickle.dumps((_cwd(), sys.path, dtype, _pickle_job(rank, function, args)))
        jobs.append(packed[key])
    return jobs


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # a folder that has been removed
        return None


def _unpickle_result(rank: int, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RuntimeError(f"the result of rank {rank} cannot be unpickled here: {error}") from error


def _pickle_job(rank: int, function: Callable[..., Any], args: tuple) -> bytes:
    try:
        return dumps((function, args))
    except Exception as error:
        raise InputError(
            "a function and its arguments travel to the workers by pickling",
            got=f"{type(error).__name__}: {error}",
            where=f"the job of rank {rank}, {getattr(function, '__name__', function)}",
            remedy="make what cannot be pickled (files, locks) inside the function; "
            "for a model give functions that build its layers: [lambda: Layer(4), ...]",
        ) from error

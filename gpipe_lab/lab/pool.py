"""Calls on a pool of workers: jobs out, replies in, and a failure on any rank raised where the call is."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

from ..engine.devices import DevicePlan
from ..plan.errors import InputError
from .board import Board
from .failures import Failure, PipelineLost, RankFailed, RunStopped, describe
from .pickling import dumps
from .processes import Message, Workers
from .watchdog import Watchdog

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
        jobs = _pack(function, args_by_rank)
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
        self._run(workers, _pack(job, [(path,)] * self.num_ranks), timeout=timeout)
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


def _pack(function: Callable[..., Any], args_by_rank: Sequence[tuple]) -> list[bytes]:
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

"""The lab: real worker processes, one for each rank, that a notebook keeps at hand."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

from ..engine.batch import Tree, split
from ..engine.device import DevicePlan, plan_devices
from ..engine.loss import LossFn
from ..engine.profile import CRITERIA, Profile
from ..plan.errors import require, require_count
from ..plan.schedule import Schedule
from ..plan.schedules import replicate
from ..plan.units import parse_bytes
from .failures import PipelineLost, raise_refusals
from .forkserver import require_loopback, start_forkserver
from .model import named_layers
from .options import ModelOptions, StepOptions, choose, takes
from .pickling import pack_jobs
from .pipeline import Pipeline
from .processes import may_have_labs
from .run import Run
from .step import MakeSchedule, made, require_no_autocast
from .worker import ProfileJob, form_group, join, profile, run_program
from .workers import OnMessage, OnOutput, Workers, print_tagged

WATCHDOG_S = 120.0
OF_A_PIPELINE = ("optimizer", "scheduler", "scheduler_per", "max_norm", "stage_to_rank")


class Lab:
    """`num_ranks` worker processes, ready for work, that end with this object or with the notebook.

    A run in which no rank comes to another operation for `watchdog_s` seconds (120, may be set; None for
    ever) is ended, and the rank that hangs is named with its stack.

    A context manager. One call runs at a time, in whichever thread; others wait for it.
    Raises `InputError` for a bad `num_ranks` or `device` before a process starts.
    """

    def __init__(
        self, num_ranks: int = 4, device: str = "auto", memory_limit: str | int | None = None
    ) -> None:
        require(
            may_have_labs(),
            "a lab is made where the notebook or script runs, not inside one of its ranks",
            got="Lab() in a worker process",
            where="Lab",
        )
        require_count(num_ranks, "num_ranks", where="Lab")
        self.device = device
        parse_bytes(memory_limit)
        self.memory_limit = memory_limit
        self.watchdog_s = WATCHDOG_S
        self.abandoned: list[str] = []  # pipelines that nobody refers to any more
        self._closed = False
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that a call is running in
        self._stop_reader, self._stop_writer = Pipe(duplex=False)
        self._stop_lock = threading.Lock()
        self._can_be_stopped = False
        self._workers: Workers | None = None
        self._group_is_used = False
        start_forkserver()  # imports torch there while this process does
        self.device_plan: DevicePlan = plan_devices(num_ranks, device)  # which device each rank has, and why
        self.generation = 0  # counts the sets of workers that have ended, and what they held with them
        with self._stoppable():
            self._ready_workers()
        _open.add(self)

    @property
    def num_ranks(self) -> int:
        return len(self.device_plan.device_names)

    def resize(self, num_ranks: int) -> None:
        """Change the number of ranks; new workers take the place of all (about 0.1 s)."""
        require_count(num_ranks, "num_ranks", where="Lab.resize")
        with self._one_at_a_time():
            if num_ranks != self.num_ranks:
                self._end_workers()
                self.device_plan = plan_devices(num_ranks, self.device)
                with self._stoppable():
                    self._ready_workers()

    def launch(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run `fn(rank_context, *args)` on every rank, inside a default process group; the results by rank.

        `fn` may be any torch.distributed program, defined anywhere, a notebook cell too. It finds no message
        that an earlier program left behind. What it prints appears tagged by rank. The first failure is
        raised as `RankFailed`. A program that has not ended after `timeout` seconds is stopped with a
        `TimeoutError` that names the ranks still at work; the next call starts on fresh workers.
        """
        require(
            callable(fn),
            "launch runs a function on every rank",
            got=repr(fn),
            where="Lab.launch",
            remedy="lab.launch(fn, *args)",
        )
        with self._one_at_a_time():
            replies = self._call(run_program, [(fn, args)] * self.num_ranks, timeout=timeout)
            self._group_is_used |= any(used_group for _, used_group in replies)
        return [result for result, _ in replies]

    @takes(ModelOptions, StepOptions, without=OF_A_PIPELINE)
    def run(
        self,
        schedule: Schedule | MakeSchedule,
        model: Any,
        inputs: Tree,
        targets: Tree | None = None,
        *,
        warmup: bool = True,
        repeats: int = 1,
        **options: Any,
    ) -> Run:
        """Run one training step of `model` through the ranks and measure it; nothing is kept afterwards.

        schedule: a `gl.Schedule`, or a function of (number of ranks, number of micro-batches) that makes one;
        it is called with the lab's ranks (a replica's) and `num_microbatches`, which only a function needs.
        model: an `nn.Sequential`, a list of layers, or a list of functions that each build a layer where
        it is to live. inputs, targets: tensors, or nestings of tensors, with the batch first; a batch that
        the micro-batches do not divide is weighted by their true sizes. What has no rows, such as a (T, T)
        mask, is marked for every micro-batch to get all of it: `(x, gl.whole(mask))`.
        warmup: run an unpaced step first and discard it.
        repeats: measure that often and return the run with the median makespan.

        Raises `InputError` or `ScheduleError` before any process works, `RankFailed` when a rank fails.
        """
        require_count(repeats, "repeats", where="Lab.run")
        how: StepOptions = choose(StepOptions, options)
        of_model: ModelOptions = choose(ModelOptions, options)
        num_replicas = of_model.num_replicas
        schedule = made(schedule, self.num_ranks // num_replicas, how.num_microbatches, where="Lab.run")
        if of_model.partition in CRITERIA and isinstance(schedule, Schedule):
            microbatch = split(inputs, num_replicas * schedule.num_microbatches)[0]
            found = self.profile(model, microbatch, seed=of_model.seed)
            sizes = found.sizes(schedule.num_stages, str(of_model.partition), schedule=schedule)
            of_model = replace(of_model, partition=sizes)
        schedule = replicate(schedule, num_replicas)
        place = getattr(schedule, "stage_to_rank", (0,))
        num_replicas = getattr(schedule, "num_replicas", 1)  # it may have been given with some
        pipe = Pipeline(self, model, replace(of_model, stage_to_rank=place, num_replicas=num_replicas))
        return pipe.run_once(schedule, inputs, targets, how, warmup=warmup, repeats=repeats)

    def profile(
        self,
        model: Any,
        microbatch: Tree,
        target: Tree = None,
        *,
        loss_fn: LossFn | None = None,
        seed: int = 0,
    ) -> Profile:
        """Measure every layer of `model` on one micro-batch, one layer at a time, on the first rank.

        `.sizes(num_stages, by=...)` of the result is a `partition`; `.frame()` a table.
        """
        require_no_autocast("Lab.profile")
        names, layers = named_layers(model)
        job = ProfileJob(microbatch, target, loss_fn, seed)
        nothing: tuple = ((), (), None)
        return self.call(profile, [(layers, names, job), *[nothing] * (self.num_ranks - 1)])[0]

    @takes(ModelOptions)
    def pipeline(self, model: Any, **options: Any) -> Pipeline:
        """Put a model's stages on the ranks, to stay there from step to step. `model` is as in `run`."""
        pipe = Pipeline(self, model, choose(ModelOptions, options))
        pipe.build()
        return pipe

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

        A call that fails, is stopped, interrupted, or takes too long ends all workers, and the next begins
        with fresh ones (about 0.1 s). So does a call that finds a worker gone.
        Raises `RankFailed` for the first rank that raises, dies, or stays in one operation of an engine's
        run for `watchdog_s` seconds while no other rank moves; `RunStopped` after `stop()`,
        `TimeoutError` after `timeout` seconds, `InputError` for a function or arguments that cannot be
        pickled, and `PipelineLost` where `generation` is given and the workers are of a later one.
        """
        require(
            len(args_by_rank) == self.num_ranks,
            "every rank has its arguments",
            got=f"{len(args_by_rank)} tuples for {self.num_ranks} ranks",
            where="Lab.call",
        )
        with self._one_at_a_time():
            results = self._call(
                function,
                args_by_rank,
                generation=generation,
                on_message=on_message,
                on_output=on_output,
                timeout=timeout,
                watchdog_s=self.watchdog_s if watchdog_s is None else watchdog_s,
            )
        raise_refusals(results)
        return results

    def stop(self) -> None:
        """End the call in progress, from another thread: it raises `RunStopped`. Without one, do nothing."""
        with self._stop_lock:
            if self._can_be_stopped and not self._stop_reader.poll():
                self._stop_writer.send_bytes(b"stop")

    def close(self) -> None:
        """End the workers. A call in progress in another thread is stopped."""
        self._refuse_a_call_within_a_call()
        self._closed = True
        self.stop()
        with self._lock:
            self._end_workers()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        self._refuse_a_call_within_a_call()
        with self._lock:
            require(
                not self._closed,
                "a closed lab runs nothing",
                got="a closed Lab",
                where="Lab",
                remedy="gl.Lab()",
            )
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _call(
        self,
        function: Callable[..., Any],
        args_by_rank: Sequence[tuple],
        *,
        generation: int | None = None,
        **how: Any,
    ) -> list[Any]:
        """What `call` does, for whoever has the lock; the options `how` are those of `Workers.run`."""
        jobs = pack_jobs(function, args_by_rank)
        with self._stoppable():
            workers = self._ready_workers()
            if generation is not None and generation != self.generation:
                raise PipelineLost("the workers that held this pipeline's weights are gone")
            return workers.run(jobs, **how)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Within, `stop` is heard; whatever goes wrong ends all workers."""
        with self._stop_lock:
            self._can_be_stopped = True
        try:
            yield
        except PipelineLost:  # the workers themselves are fine
            raise
        except BaseException:
            self._end_workers()
            raise
        finally:
            with self._stop_lock:
                self._can_be_stopped = False
                if self._stop_reader.poll():
                    self._stop_reader.recv_bytes()

    def _ready_workers(self) -> Workers:
        """The workers, started where need be, in a default process group that nobody has used."""
        workers = self._workers
        if workers is None or not workers.intact():
            self._end_workers()
            require_loopback()
            self._workers = workers = Workers(self.device_plan, self._stop_reader)
            workers.start()
            workers.form_group(join)
        elif self._group_is_used:
            workers.form_group(form_group)
        self._group_is_used = False
        return workers

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end()
            self.generation += 1
        self._workers = None

    def _refuse_a_call_within_a_call(self) -> None:
        require(
            self._caller != threading.get_ident(),
            "a lab does one thing at a time",
            got="a call from within a call, in its on_message or on_output",
            where="Lab",
        )


_open: weakref.WeakSet[Lab] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End every lab with the interpreter, a call that a daemon thread waits for included."""
    for lab in list(_open):
        lab.close()

"""What runs in a worker process: jobs on the main thread, and a listener that ends the process when told."""

from __future__ import annotations

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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..engine.batch import Tree
from ..engine.device import Device, DevicePlan, open_device, take_device
from ..engine.distributed import Meeting, open_transport
from ..engine.executor import RankResult, StepJob
from ..engine.loss import LossFn
from ..engine.profile import Profile, profile_layers, recorded
from ..engine.rank_pipeline import Layer, PipelineSpec, RankPipeline, StepRefused
from ..engine.saving import load_state, save_state
from ..engine.stage import Objective
from ..engine.transport import Transport
from ..plan.errors import InputError
from .board import ASK_STACK, RankBoard, main_thread_stack
from .failures import SOCKETS_CLOSED, SOCKETS_CLOSED_CODE, Failure, Refused
from .pickling import dumps
from .processes import become_rank, kill_descendants, note_sockets, sockets_are_closed

# The driver sees every death itself, so a transfer may take as long as a slow step or a breakpoint needs.
GROUP_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Seat:
    """What a worker is given when it starts."""

    rank: int
    device_plan: DevicePlan
    board_path: str
    pipe: Connection
    environment: dict[str, str]
    rendezvous: str  # a private folder that lives as long as the set of workers


@dataclass
class RankContext:
    """The first argument of every job: which rank this is, and what it keeps.

    `state` survives from job to job until the workers are replaced. `groups` holds whatever belongs to
    the default process group, such as groups made from it, and is emptied when that is replaced. That group
    is for programs alone: the engine's messages go over others.
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
    """The worker's end of the pipe for writing, shared by all its threads.

    A finaliser may print in the middle of a message, so nobody waits here: whoever is writing writes what
    has come in meanwhile as well.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        self._waiting.append(pickle.dumps((kind, content)))
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                while self._waiting:
                    self._seat.pipe.send_bytes(self._waiting.popleft())
            except OSError:  # the driver is gone or has dismissed this worker
                leave(self._seat)
            finally:
                self._writing.release()

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
    become_rank()
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
    board = RankBoard(seat.board_path, seat.rank)
    context = RankContext(seat.rank, num_ranks, device, plan, board, outbox.report, seat.rendezvous)
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
            if received != ASK_STACK:
                jobs.put(received)
            elif sockets_are_closed():
                outbox.send("failure", Failure(seat.rank, SOCKETS_CLOSED, main_thread_stack()))
            else:
                outbox.send("stack", main_thread_stack())
    except (EOFError, OSError):
        pass  # the driver closed the pipe, or died
    finally:
        leave(seat)


def leave(seat: Seat) -> NoReturn:
    """End the process, whatever its main thread hangs in, with its children and its set's folder."""
    code = SOCKETS_CLOSED_CODE if sockets_are_closed() else 0
    try:
        for child in multiprocessing.active_children():
            child.kill()
        kill_descendants()
        shutil.rmtree(seat.rendezvous, ignore_errors=True)
    finally:
        os._exit(code)


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
        failure = Failure.of_exception(context.rank, error)
        if failure.is_consequence and sockets_are_closed():
            failure = replace(failure, reason=SOCKETS_CLOSED, is_consequence=False)
        return "failure", failure
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
    """The first job of every worker: the engine's own groups, and a default one for programs."""
    take_device(context.device_plan, context.rank)
    store = dist.FileStore(f"{store_path} of the engine", context.num_ranks)
    context.state["meeting"] = Meeting(store, context.rank, context.num_ranks, GROUP_TIMEOUT)
    _transport(context)
    note_sockets()
    form_group(context, store_path)


def form_group(context: RankContext, store_path: str) -> None:
    """A job: give the rank a fresh default process group, ending the one it may have.

    The end of a group waits for what a program has left unfinished in it, so a thread sees to that.
    """
    context.groups.clear()
    if dist.is_initialized():
        ended = [*dist.distributed_c10d._world.pg_map]
        dist.destroy_process_group()
        threading.Thread(target=ended.clear, daemon=True).start()
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


@dataclass(frozen=True)
class ProfileJob:
    """One micro-batch to profile layers on, and what the last one's loss needs."""

    microbatch: Tree
    target: Tree = None
    loss_fn: LossFn | None = None
    seed: int = 0


def profile(
    context: RankContext, layers: Sequence[Layer], names: Sequence[str], job: ProfileJob
) -> Profile | None:
    """A job: measure a model's layers one by one, on the first rank; the others leave it the machine."""
    if context.rank > 0:
        return None
    objective = None if job.loss_fn is None else Objective(job.loss_fn, job.target, 1.0)
    return profile_layers(layers, names, job.microbatch, _device(context), objective=objective, seed=job.seed)


Request = tuple  # (build, key, spec), (step, key, job, ...): a function below, a pipeline's key, the rest


def serve(context: RankContext, requests: Sequence[Request]) -> list[Any]:
    """A job: what the driver asks of the pipelines here, one request after the other; the answers."""
    return [function(context, *args) for function, *args in requests]


def build(context: RankContext, key: str, spec: PipelineSpec) -> None:
    """Keep a pipeline under `key` until it is dropped or the workers are replaced."""
    context.state[key] = RankPipeline(spec, context.board, _transport(context))


def drop(context: RankContext, key: str) -> None:
    context.state.pop(key, None)


def step(
    context: RankContext, key: str, job: StepJob, update: bool, strict: bool
) -> tuple[RankResult, float, float]:
    """One step; the rank's result, the loss of the whole batch and the norm of all gradients."""
    pipeline: RankPipeline = context.state[key]
    transport = _transport(context, strict)
    transport.link_ms = 0.0 if job.pace is None else job.pace.link_ms
    with recorded(job.profile, context.scratch) as recording:
        if job.step.gradients:
            result, loss, norm = pipeline.step(job, transport, update=update)
        else:
            (result, loss), norm = pipeline.run(job, transport), 0.0
    result.profile = recording.content
    return result, loss, norm


def measure(
    context: RankContext, key: str, jobs: Sequence[StepJob], strict: bool
) -> tuple[list[tuple[RankResult, float, float]], dict[str, torch.Tensor]]:
    """Steps that each begin from the pipeline as it is now; and the gradients of the last."""
    pipeline: RankPipeline = context.state[key]
    start = pipeline.snapshot()
    steps = []
    for job in jobs:
        pipeline.zero_grad()
        start.restore()
        steps.append(step(context, key, job, False, strict))
    return steps, gradients(pipeline)


def apply(context: RankContext, key: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(pipeline, *args)` with the pipeline kept under `key`."""
    return function(context.state[key], *args)


def save(context: RankContext, key: str, folder: str, steps: int) -> str:
    """Write the state of training; the save within the folder."""
    return str(save_state(context.state[key], _transport(context), folder, steps))


def load(context: RankContext, key: str, folder: str) -> int | InputError:
    """The steps behind the state, or why it does not fit: the pipeline then keeps what it has."""
    try:
        return load_state(context.state[key], _transport(context), folder)
    except InputError as refused:
        return refused


def gradients(pipeline: RankPipeline) -> dict[str, torch.Tensor]:
    """The gradients of the weights here, on the CPU."""
    return pipeline.gradients.copies()


def _device(context: RankContext) -> Device:
    if "device" not in context.state:
        context.state["device"] = open_device(context.device_plan, context.rank)
    return context.state["device"]


def _transport(context: RankContext, strict: bool = False) -> Transport:
    """This rank's end of the engine's messages, which lives as long as the worker."""
    key = "strict transport" if strict else "transport"
    if key not in context.state:
        meeting: Meeting = context.state["meeting"]
        mine = replace(meeting, store=dist.PrefixStore(key, meeting.store))
        context.state[key] = open_transport(context.device_plan, _device(context), mine, strict=strict)
    return context.state[key]

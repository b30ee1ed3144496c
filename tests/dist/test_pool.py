"""Calls on a lab's workers: results, failures on any rank, stopping, output, and how long they take."""

import itertools
import os
import pickle
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

import gpipe_lab as gl
from gpipe_lab.engine.messages import PeerLost
from gpipe_lab.lab import forkserver, workers
from gpipe_lab.lab.board import RankBoard, SharedBoard
from gpipe_lab.lab.failures import Failure, PipelineLost, RankFailed, RunStopped, describe
from gpipe_lab.lab.lab import Lab
from gpipe_lab.plan.errors import InputError
from gpipe_lab.plan.ops import Kind, Op

pytestmark = pytest.mark.dist
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if they were defined in a cell


@pytest.fixture(scope="module")
def lab():
    with Lab(3, device="cpu") as lab:
        yield lab


def everywhere(lab):
    return [()] * lab.num_ranks


def pids(lab):
    return lab.call(lambda context: os.getpid(), everywhere(lab))


def hang(context):
    context.board.mark(Op(Kind.F, context.rank, 0))
    context.report("hanging")
    time.sleep(60)


def within(limit_s, measure, name, tries=3):
    """Print the best of a few measurements, for the machine is shared, and hold it to its limit."""
    best = min(measure() for _ in range(tries))
    print(f"{name}: {best * 1e3:.2f} ms (limit {limit_s * 1e3:.0f} ms)")
    assert best < limit_s


# Results


def test_results_come_by_rank_and_arguments_differ_by_rank(lab):
    assert lab.call(lambda context, x: (context.rank, context.num_ranks, x), [("a",), ("b",), ("c",)]) == [
        (0, 3, "a"),
        (1, 3, "b"),
        (2, 3, "c"),
    ]


def test_workers_stay_alive_and_state_survives(lab):
    before = pids(lab)
    lab.call(lambda context: context.state.update(kept=context.rank), everywhere(lab))
    assert lab.call(lambda context: context.state["kept"], everywhere(lab)) == [0, 1, 2]
    assert pids(lab) == before


def test_tensors_and_classes_of_a_cell_travel(lab):
    class Layer(torch.nn.Linear):
        pass

    layer = Layer(2, 2)
    for result in lab.call(lambda context, layer: layer, [(layer,)] * 3):
        assert type(result) is Layer
        assert torch.equal(result.weight, layer.weight)


def test_default_dtype_travels_with_the_job(lab):
    torch.set_default_dtype(torch.float64)
    try:
        assert {x.dtype for x in lab.call(lambda context: torch.ones(1), everywhere(lab))} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in lab.call(lambda context: torch.ones(1), everywhere(lab))} == {torch.float32}


def test_one_job_does_not_leave_its_settings_to_the_next(lab):
    lab.call(lambda context: (torch.set_grad_enabled(False), torch.set_num_threads(2)), everywhere(lab))
    settings = lab.call(lambda context: (torch.is_grad_enabled(), torch.get_num_threads()), everywhere(lab))
    assert settings == [(True, 1)] * 3


def test_the_drivers_environment_and_path_reach_the_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("A_SETTING", "7")
    with Lab(1, device="cpu") as lab:
        (tmp_path / "a_helper_of_the_learner.py").write_text("def answer(context):\n    return 42\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        import a_helper_of_the_learner

        assert lab.call(a_helper_of_the_learner.answer, [()]) == [42]
        assert lab.call(lambda context: os.environ["A_SETTING"], [()]) == ["7"]


def test_reports_reach_the_driver_before_the_result(lab):
    seen = []
    lab.call(
        lambda context: [context.report(i) for i in range(3)],
        everywhere(lab),
        on_message=lambda rank, value: seen.append((rank, value)),
    )
    assert sorted(seen) == [(rank, i) for rank in range(3) for i in range(3)]


def test_the_forkserver_has_one_thread_and_no_gpu(lab):
    """A fork of a process with threads may hang, and one of a process with CUDA running cannot use it."""

    def look(context):
        return os.getppid(), torch.cuda.is_initialized(), "gpipe_lab.lab.worker" in sys.modules

    ((forkserver, has_cuda, has_jobs),) = set(lab.call(look, everywhere(lab)))
    assert psutil.Process(forkserver).num_threads() == 1
    assert not has_cuda
    assert has_jobs, "what the workers need was preloaded"


def test_spawn_serves_where_there_is_no_forkserver(monkeypatch):
    monkeypatch.setattr(forkserver.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with Lab(2, device="cpu") as lab:
        assert lab.call(lambda context: context.rank, everywhere(lab)) == [0, 1]


# Output


def test_prints_are_tagged_in_order(lab, capsys):
    def talk(context):
        for i in range(3):
            print("line", i)
        print("two\nlines", end="")
        print("warned", file=sys.stderr)

    lab.call(talk, everywhere(lab))
    captured = capsys.readouterr()
    for rank in range(3):
        mine = [line for line in captured.out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {text}" for text in ("line 0", "line 1", "line 2", "two", "lines")]
    assert sorted(captured.err.splitlines()) == [f"[rank {rank}] warned" for rank in range(3)]


def test_what_a_failed_rank_printed_is_shown(lab, capsys):
    def fail(context):
        print("last words")
        raise ValueError

    with pytest.raises(RankFailed):
        lab.call(fail, everywhere(lab))
    assert "last words" in capsys.readouterr().out


# Failures


def fail_as(context, kind, failing_rank):
    """One rank fails in its full backward while the others wait for it."""
    context.board.mark(Op(Kind.B, context.rank, 1))
    if context.rank != failing_rank:
        dist.recv(torch.zeros(1), failing_rank)
    if kind == "exception":
        raise ValueError("no such thing\nand more")
    if kind == "exit":
        os._exit(3)
    if kind == "sys.exit":
        sys.exit("enough")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "headline"),
    [
        ("exception", "rank {0} failed in {1}: ValueError: no such thing\n"),
        ("sys.exit", "rank {0} failed in {1}: SystemExit: enough\n"),
        ("exit", "rank {0} died (exit code 3) in {1}"),
        ("kill", "rank {0} died (killed by SIGKILL) in {1}"),
    ],
)
def test_a_failed_rank_ends_the_call_and_is_named(lab, kind, headline, failing_rank):
    before = pids(lab)
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        lab.call(fail_as, [(kind, failing_rank)] * 3)
    took_s = time.monotonic() - start
    print(f"{kind} on rank {failing_rank}: raised after {took_s * 1e3:.0f} ms")
    assert took_s < 3
    op = f"{failing_rank}B1 (stage {failing_rank}, full backward of micro-batch 1)"
    assert str(caught.value).startswith(headline.format(failing_rank, op))
    assert caught.value.rank == failing_rank
    assert caught.value.op == Op(Kind.B, failing_rank, 1)
    assert not set(pids(lab)) & set(before)


def test_the_error_holds_the_ranks_own_traceback_and_exception(lab):
    with pytest.raises(RankFailed) as caught:
        lab.call(fail_as, [("exception", 1)] * 3)
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("no such thing' in text
    assert "worker.py" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_no_operation_is_named_outside_one(lab):
    def fail_later(context):
        context.board.mark(Op(Kind.F, 0, 0))
        context.board.clear()
        raise KeyError("x")

    with pytest.raises(RankFailed, match=r"^rank \d failed: KeyError: 'x'"):
        lab.call(fail_later, everywhere(lab))


def test_a_consequence_is_not_blamed(lab):
    def lose(context):
        if context.rank == 2:
            time.sleep(0.3)
            raise ValueError("the cause")
        raise PeerLost("the other end is gone")

    with pytest.raises(RankFailed, match="rank 2 failed: ValueError: the cause"):
        lab.call(lose, everywhere(lab))


@pytest.mark.alone
def test_a_consequence_without_a_cause_is_told_soon(lab):
    def lose(context):
        if context.rank == 0:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 failed: RuntimeError: Connection closed"):
        lab.call(lose, everywhere(lab))
    assert time.monotonic() - start < 2.5


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_an_exception_that_cannot_be_pickled_is_told(lab):
    def fail(context):
        raise Unpicklable("this", "that")

    with pytest.raises(RankFailed, match="Unpicklable: this that") as caught:
        lab.call(fail, everywhere(lab))
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_be_pickled_is_told(lab):
    def give(context):
        return threading.Lock() if context.rank == 1 else None

    with pytest.raises(RankFailed, match=r"rank 1 .*the result of rank 1 \(lock\) cannot be pickled"):
        lab.call(give, everywhere(lab))


def test_an_argument_that_cannot_be_pickled_is_refused_and_the_workers_stay(lab):
    before = pids(lab)
    with pytest.raises(InputError, match="travel to the workers by pickling"):
        lab.call(lambda context, x: None, [(threading.Lock(),)] * 3)
    assert pids(lab) == before


def test_an_error_in_a_callback_is_raised_here(lab):
    def refuse(rank, value):
        raise LookupError(value)

    with pytest.raises(LookupError, match="hanging"):
        lab.call(hang, everywhere(lab), on_message=refuse)
    assert len(pids(lab)) == 3


def test_a_worker_that_died_between_calls_is_replaced(lab):
    before, generation = pids(lab), lab.generation
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(PipelineLost):
        lab.call(lambda context: None, everywhere(lab), generation=generation)
    assert not set(pids(lab)) & set(before)
    assert lab.generation == generation + 1


def test_generation_tells_that_workers_were_replaced(lab):
    generation = lab.generation
    lab.call(lambda context: None, everywhere(lab), generation=generation)
    with pytest.raises(RankFailed):
        lab.call(fail_as, [("exception", 0)] * 3)
    assert lab.generation == generation + 1
    with pytest.raises(PipelineLost):
        lab.call(lambda context: None, everywhere(lab), generation=generation)
    before = pids(lab)
    with pytest.raises(PipelineLost):
        lab.call(lambda context: None, everywhere(lab), generation=generation)
    assert pids(lab) == before, "workers that are fine are kept"


def test_an_op_is_described():
    assert describe(Op(Kind.F, 1, 0)) == "1F0 (stage 1, forward of micro-batch 0)"
    assert describe(Op(Kind.R, 1, 0, 2)) == "1R0.2 (stage 1, recompute of micro-batch 0, segment 2)"
    assert describe(Op(Kind.STEP, 1, 0)) == "1STEP0 (stage 1, optimizer step)"
    assert str(Failure.of_death(1, -11).error(None)) == "rank 1 died (killed by SIGSEGV)"


def test_every_op_fits_on_the_board(tmp_path):
    board = SharedBoard(tmp_path, 2)
    mine = RankBoard(board.path, 1)
    for kind in Kind:
        for op in (Op(kind, 0, 0), Op(kind, 65535, 2**24 - 1, 2**15 - 1)):
            mine.mark(op)
            assert board.read(1) == op
    mine.clear()
    assert board.read(0) is board.read(1) is None


# Stopping


@pytest.mark.alone
def test_stop_from_another_thread_ends_the_call(lab):
    before = pids(lab)
    stopped_at = []

    def stop(rank, value):
        stopped_at.append(time.monotonic())
        threading.Thread(target=lab.stop).start()

    with pytest.raises(RunStopped):
        lab.call(hang, everywhere(lab), on_message=stop)
    assert time.monotonic() - stopped_at[0] < 1
    assert not set(pids(lab)) & set(before)


def test_stop_between_calls_does_nothing(lab):
    before = pids(lab)
    lab.stop()
    assert pids(lab) == before


def test_a_time_limit_says_where_the_ranks_were(lab):
    with pytest.raises(TimeoutError, match=r"rank 1 in 1F0 \(stage 1, forward of micro-batch 0\)"):
        lab.call(hang, everywhere(lab), timeout=0.3)


@pytest.mark.alone
def test_a_rank_that_holds_the_interpreter_is_killed(lab):
    def hold(context):
        context.report(None)
        sum(range(10**12))  # never lets the listener thread run

    def stop(rank, value):
        threading.Thread(target=lab.stop).start()

    start = time.monotonic()
    with pytest.raises(RunStopped):
        lab.call(hold, everywhere(lab), on_message=stop)
    assert time.monotonic() - start < 2


def test_close_ends_a_call_in_another_thread():
    lab = Lab(2, device="cpu")
    threading.Timer(0.3, lab.close).start()
    with pytest.raises(RunStopped):
        lab.call(hang, everywhere(lab))
    with pytest.raises(InputError, match="closed"):
        lab.call(hang, everywhere(lab))


# Threads and labs


def test_calls_from_two_threads_take_turns(lab):
    spans = []

    def run():
        results = lab.call(
            lambda context: (time.monotonic(), time.sleep(0.05), time.monotonic()), everywhere(lab)
        )
        spans.append((min(r[0] for r in results), max(r[2] for r in results)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_call_within_a_call_is_refused(lab):
    with pytest.raises(InputError, match="one thing at a time"):
        lab.call(hang, everywhere(lab), on_message=lambda rank, value: pids(lab))


def test_two_labs_do_not_disturb_each_other(lab):
    with Lab(2, device="cpu") as other:
        ours, theirs = pids(lab), pids(other)
        with pytest.raises(RankFailed):
            other.call(fail_as, [("kill", 0)] * 2)
        assert pids(lab) == ours
        assert not set(pids(other)) & {*ours, *theirs}


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, True, "4"])
def test_a_bad_number_of_ranks_is_refused_before_a_process_starts(monkeypatch, lab, num_ranks):
    monkeypatch.setattr(workers.Workers, "start", lambda self: pytest.fail("a process was started"))
    with pytest.raises(InputError, match="num_ranks"):
        Lab(num_ranks)
    with pytest.raises(InputError, match="num_ranks"):
        lab.resize(num_ranks)
    with pytest.raises(InputError, match="device"):
        Lab(2, device="tpu")


def test_arguments_for_another_number_of_ranks_are_refused(lab):
    with pytest.raises(InputError, match="every rank has its arguments"):
        lab.call(lambda context: None, [()])


# How long it takes


@pytest.mark.alone
def test_a_lab_of_eight_is_ready_soon(lab):
    def start():
        begin = time.perf_counter()
        with Lab(8, device="cpu"):
            return time.perf_counter() - begin

    within(0.5, start, "lab of 8, not the first")


@pytest.mark.alone
def test_an_empty_job_is_quick(lab):
    def empty(run):
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    within(0.005, lambda: empty(lambda: lab.call(lambda context: None, everywhere(lab))), "empty call")
    within(0.005, lambda: empty(lambda: lab.launch(lambda context: None)), "empty launch")
    with Lab(8, device="cpu") as eight:
        within(0.005, lambda: empty(lambda: eight.launch(lambda context: None)), "empty launch on 8")


@pytest.mark.alone
def test_resizing_is_quick():
    def resize():
        with Lab(4, device="cpu") as lab:
            begin = time.perf_counter()
            lab.resize(6)
            assert lab.launch(lambda context: context.num_ranks) == [6] * 6
            return time.perf_counter() - begin

    within(1.0, resize, "resize from 4 to 6 and the next launch")


@pytest.mark.alone
def test_a_run_after_a_failure_is_quick(lab):
    def fail_and_run():
        with pytest.raises(RankFailed):
            lab.call(fail_as, [("exception", 0)] * 3)
        begin = time.perf_counter()
        pids(lab)
        return time.perf_counter() - begin

    within(0.5, fail_and_run, "the call after a failed one")


@pytest.mark.alone
def test_marking_the_board_is_cheap(lab):
    def mark(context):
        op = Op(Kind.B, 2, 1)
        begin = time.perf_counter()
        for _ in range(1000):
            context.board.mark(op)
        return (time.perf_counter() - begin) / 1000

    within(5e-6, lambda: min(lab.call(mark, everywhere(lab))), "board.mark")


def test_a_rank_works_in_the_drivers_folder_as_it_is_now(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lab.launch(lambda context: os.getcwd()) == [str(tmp_path)] * 3


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


def test_an_exception_that_cannot_be_printed_is_a_failure_not_a_death(lab):
    def fail(context):
        raise Wordless

    with pytest.raises(RankFailed, match="Wordless") as caught:
        lab.launch(fail)
    assert not caught.value.died


def make_a_lab(context):
    import gpipe_lab

    return gpipe_lab.Lab(1)


def test_a_lab_within_a_rank_is_refused_and_harms_nothing(lab):
    with pytest.raises(RankFailed, match="not inside one of its ranks"):
        lab.launch(make_a_lab)
    assert lab.launch(lambda context: context.rank) == [0, 1, 2]


def test_a_lab_in_a_child_process_leaves_the_drivers_files_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILD_WITH_A_LAB)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.split() == ["1", "2"], done.stderr


CHILD_WITH_A_LAB = """
import multiprocessing
import time
import gpipe_lab as gl

def child():
    with gl.Lab(1, device="cpu") as lab:
        print(*lab.launch(lambda context: 1), flush=True)

if __name__ == "__main__":
    with gl.Lab(1, device="cpu") as lab:
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()
        time.sleep(1.0)  # until the child's forkserver has gone as well
        lab.resize(2)
        print(len(lab.launch(lambda context: 1)))
"""


# Errors that are hard to tell


class Unspeakable(RuntimeError):
    def __str__(self):
        raise SystemExit("no words")


class Vanishing(Exception):
    def __reduce__(self):
        raise KeyboardInterrupt


class NoException(Exception):
    def __reduce__(self):
        return str, ("not an exception",)


@pytest.mark.parametrize("kind", [Unspeakable, Vanishing, NoException])
def test_an_error_that_fights_being_told_is_told_as_itself(lab, kind):
    def fail(context):
        if context.rank == 1:
            raise kind("told")

    with pytest.raises(RankFailed, match=f"rank 1 failed: {kind.__name__}") as caught:
        lab.call(fail, everywhere(lab))
    assert not caught.value.died
    assert isinstance(caught.value.__cause__, kind if kind is Unspeakable else type(None))


def test_an_error_of_a_million_lines_is_told_shortened_and_soon(lab):
    def fail(context):
        raise ValueError("first line\n" + "more\n" * 10**6 + "last line")

    begin = time.monotonic()
    with pytest.raises(RankFailed, match="ValueError: first line") as caught:
        lab.call(fail, everywhere(lab))
    text = str(caught.value)
    assert time.monotonic() - begin < 3
    assert len(text) < 25_000 and "characters are left out" in text and text.endswith("last line")


def test_an_error_in_one_long_line_has_a_short_headline(lab):
    def fail(context):
        raise ValueError("x" * 10**7)

    with pytest.raises(RankFailed) as caught:
        lab.call(fail, everywhere(lab))
    assert len(caught.value.reason) < 1000 and len(str(caught.value)) < 25_000


@pytest.mark.parametrize("lowest", [3, 5])
@pytest.mark.parametrize("ending", ["waits", "returns"])
def test_a_rank_that_closes_file_descriptors_is_blamed_itself(lab, lowest, ending):
    def close(context):
        context.board.mark(Op(Kind.F, context.rank, 0), waits=context.rank != 1)
        if context.rank == 1:
            os.closerange(lowest, 1000)
            if ending == "returns":
                return None
            time.sleep(60)
        dist.recv(torch.zeros(1), 1)

    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        lab.call(close, everywhere(lab), watchdog_s=1)
    assert time.monotonic() - begin < 5
    assert caught.value.rank == 1, caught.value
    assert caught.value.op in (None, Op(Kind.F, 1, 0))
    assert lab.call(lambda context: context.rank, everywhere(lab)) == [0, 1, 2]


def test_a_rank_that_was_stopped_while_it_waited_is_the_one_named(lab):
    """All wait: that one alone does not say where it is."""

    def wait(context):
        context.board.mark(Op(Kind.RECV_F, context.rank, 0), waits=True)
        if context.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"rank 2 failed in 2RECV_F0 .*it hangs"):
        lab.call(wait, everywhere(lab), watchdog_s=0.5)
    assert lab.call(lambda context: context.rank, everywhere(lab)) == [0, 1, 2]


class Prints:
    def __del__(self):
        print("finalised")


def test_a_finaliser_may_print_while_the_pipe_is_being_written(lab, capsys):
    def print_within(context):
        outbox = context.report.__self__
        pipe = outbox._seat.pipe

        class Interrupted:
            is_first = True

            def send_bytes(self, data):
                if self.is_first:
                    self.is_first = False
                    Prints()  # as the garbage collector would, in the middle of a message
                pipe.send_bytes(data)

        object.__setattr__(outbox._seat, "pipe", Interrupted())
        context.report("reported")
        object.__setattr__(outbox._seat, "pipe", pipe)
        return "done"

    assert lab.call(print_within, everywhere(lab), timeout=5) == ["done"] * 3
    assert capsys.readouterr().out.count("finalised") == 3


# What surrounds the lab


def test_a_broken_loopback_is_named_before_a_process_starts(monkeypatch):
    def refuse(*args, **options):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(forkserver.socket, "create_connection", refuse)
    monkeypatch.setattr(workers.Workers, "start", lambda self: pytest.fail("a process was started"))
    with pytest.raises(RuntimeError, match=r"loopback interface(.|\n)*unreachable(.|\n)*ip link set"):
        Lab(2, device="cpu")
    with pytest.raises(RuntimeError, match=r"loopback interface(.|\n)*unreachable(.|\n)*ip link set"):
        gl.doctor(2, device="cpu")


def script_in(tmp_path, code, *, wrapper=(), **environment):
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [*wrapper, sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


SMALL_LAB = """
import gpipe_lab as gl
with gl.Lab(2, device="cpu") as lab:
    print(*lab.launch(lambda context: context.rank))
"""


def can_unshare(*flags):
    try:
        return subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_unshare("-rn"), reason="no network namespaces here")
def test_a_loopback_that_is_down_is_named(tmp_path):
    done = script_in(tmp_path, SMALL_LAB, wrapper=["unshare", "-rn"])
    assert done.returncode != 0
    assert "remedy: bring it up, as root: ip link set lo up" in done.stderr


@pytest.mark.skipif(not can_unshare("-rm"), reason="no mount namespaces here")
def test_shared_memory_that_is_read_only_is_not_needed(tmp_path):
    command = 'mount -t tmpfs -o ro none /dev/shm && exec "$0" "$@"'
    done = script_in(tmp_path, SMALL_LAB, wrapper=["unshare", "-rm", "sh", "-c", command])
    assert done.stdout.split() == ["0", "1"], done.stderr


@pytest.mark.parametrize("length", [76, 200])
def test_a_long_temporary_folder_is_no_obstacle(tmp_path, length):
    folder = (
        tmp_path / ("x" * (length - len(str(tmp_path)) - 1)) if len(str(tmp_path)) < length - 1 else tmp_path
    )
    folder.mkdir(exist_ok=True)
    done = script_in(tmp_path, SMALL_LAB, TMPDIR=str(folder))
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert list(folder.iterdir()) == []


def test_where_no_folder_is_short_enough_the_limit_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(forkserver.os, "access", lambda *args: False)
    with pytest.raises(InputError, match=r"path may have \d+ bytes(.|\n)*TMPDIR"):
        forkserver._short_temp_dir()

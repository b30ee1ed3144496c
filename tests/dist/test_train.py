"""The training command: on one process, under torchrun, on two hosts of which one is cut off."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hosts import PACKAGE_ROOT, two_hosts, why_not

import gpipe_lab as gl
from gpipe_lab.engine.device import now_ms, open_device
from gpipe_lab.engine.distributed import Meeting, open_transport
from gpipe_lab.engine.saving import saves
from gpipe_lab.plan.ops import Kind, Op
from gpipe_lab.train.clock import measure_offset
from gpipe_lab.train.watchdog import Watchdog
from gpipe_lab.train.world import require_same

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CONFIG = """
[pipeline]
num_microbatches = {num_microbatches}
num_replicas = {num_replicas}
device = "cpu"
[model]
num_blocks = 2
width = 16
num_heads = 2
length = 16
dropout = 0.1
[training]
num_steps = {num_steps}
rows = 8
corpus_bytes = 65536
timeout_s = {timeout_s}
watchdog_s = {watchdog_s}
[save]
folder = "{folder}"
every = 5
[log]
every = 5
trace_file = "{folder}.json"
"""
NUM_STEPS = 30


def write_config(tmp_path, name, *, num_steps=NUM_STEPS, num_replicas=1, timeout_s=60, watchdog_s=60):
    folder = tmp_path / name
    path = tmp_path / f"{name}.toml"
    path.write_text(
        CONFIG.format(
            folder=folder,
            num_steps=num_steps,
            num_replicas=num_replicas,
            num_microbatches=4 // num_replicas,
            timeout_s=timeout_s,
            watchdog_s=watchdog_s,
        )
    )
    return path, folder


def train(config, num_processes=None, check=True):
    """What the command prints."""
    launcher = [sys.executable]
    if num_processes is not None:
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(num_processes)]
    process = subprocess.Popen(
        [*launcher, "-m", "gpipe_lab.train", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PACKAGE_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PACKAGE_ROOT},
    )
    try:
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not check or process.returncode == 0, printed
    return printed


def losses(printed):
    """step -> loss; a step that was done twice had the same loss both times."""
    found = {}
    for step, loss in re.findall(r"step (\d+): loss (\S+),", printed):
        assert found.setdefault(int(step), float(loss)) == float(loss)
    return found


def same(state, other):
    assert set(state) == set(other)
    return all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(losses, weights) of a training on two stages that nothing happens to."""
    config, folder = write_config(tmp_path_factory.mktemp("undisturbed"), "state")
    printed = train(config, 2)
    assert "P = 2, M = 4, replicas = 1" in printed and "from the start" in printed
    return losses(printed), gl.load_weights(folder)


def test_it_learns_and_every_step_is_said_once(undisturbed):
    found, _ = undisturbed
    assert list(found) == list(range(5, NUM_STEPS + 1, 5))
    assert found[NUM_STEPS] < found[5] - 0.3


def test_one_process_stopped_and_started_again(undisturbed, tmp_path):
    config, folder = write_config(tmp_path, "state")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpipe_lab.train", "--config", str(config)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PACKAGE_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PACKAGE_ROOT},
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 15:"):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    printed = "".join(lines)
    again = train(config)
    assert re.search(r"P = 1, .*; resumed after step 1[05]\n", again)
    found, weights = undisturbed
    assert losses(printed + again) == found  # bitwise, at another number of stages
    assert same(gl.load_weights(folder), weights)
    assert f"the last of {NUM_STEPS}: nothing is left to train" in train(config)


def test_a_rank_that_is_stopped_is_named_and_the_job_ends(tmp_path):
    config, _ = write_config(tmp_path, "state", num_steps=100_000, watchdog_s=3)
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "gpipe_lab.train",
        "--config",
        config,
    ]
    log = tmp_path / "log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=PACKAGE_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PACKAGE_ROOT},
        )
        try:
            wait_for(lambda: "step 200:" in log.read_text(), job)  # some seconds: ranks say once a second
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            ranks = {rank_of(pid): int(pid) for pid in children}
            os.kill(ranks["1"], signal.SIGSTOP)
            began = time.monotonic()
            assert job.wait(60) != 0
            took = time.monotonic() - began
        finally:
            job.kill()
    printed = log.read_text()
    named = r"rank 1, last seen in 1\S+ \(stage 1, .*\), gives no sign of life for 3 s"
    assert re.search(f"^TimeoutError: {named}", printed, re.MULTILINE), printed
    assert re.search(f"Root Cause.*{named}", printed, re.DOTALL), printed
    assert took < 20, "the launcher waits 30 s for a process that does not end"


def test_a_rank_that_does_not_move_is_named_by_the_one_before_it(capfd):
    def hang(context):
        watchdog = Watchdog(context.rank, context.num_ranks, limit_s=1.5)
        with watchdog:
            for microbatch in range(2 if context.rank == 1 else 40):
                watchdog.mark(Op(Kind.F, context.rank, microbatch), waits=context.rank != 1)
                time.sleep(0.1)
            time.sleep(60)

    with gl.Lab(3, device="cpu") as lab:
        with pytest.raises(gl.RankFailed) as caught:
            lab.launch(hang)
        assert caught.value.died and caught.value.rank in (0, 1)
        assert (
            "rank 1, last seen in 1F1 (stage 1, forward of micro-batch 1), does not move"
            in capfd.readouterr().err
        )


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.decode().removeprefix("RANK=") for v in variables if v.startswith(b"RANK=")), None)


def test_replicas_of_pipelines(undisturbed, tmp_path):
    config, folder = write_config(tmp_path, "state", num_replicas=2)
    printed = train(config, 4)
    assert "P = 2, M = 2, replicas = 2" in printed
    assert losses(printed) == pytest.approx(undisturbed[0], rel=1e-5)
    events = json.loads(folder.with_suffix(".json").read_text())["traceEvents"]
    reduced = [e for e in events if e["ph"] == "X" and "REDUCE" in e["name"]]
    assert sorted(e["pid"] for e in reduced) == [0, 1, 2, 3]


def test_a_job_of_the_wrong_size_says_so(tmp_path):
    config, _ = write_config(tmp_path, "state", num_replicas=2)
    printed = train(config, check=False)
    assert "a job has a process for every rank of every replica" in printed
    assert "1 processes for 2 x 1 ranks" in printed


def test_clocks_are_compared_within_the_bound(lab_of):
    def shifted(context):
        found = measure_offset(lambda: now_ms() + 5000.0 * context.rank)
        return found.offset_ms, found.error_ms

    offsets = lab_of(3).launch(shifted)
    assert offsets[0] == (0.0, 0.0)
    for rank, (offset, error) in enumerate(offsets):
        assert abs(offset + 5000.0 * rank) <= error + 1e-6  # in truth it is one clock
        assert error < 50.0


def test_hosts_that_differ_are_told(lab_of):
    def check(context, value):
        transport = open_transport(
            context.device_plan, open_device(context.device_plan, context.rank), Meeting.of_default_group()
        )
        require_same(transport, value or context.rank, "all are the same", where="here", remedy="one file")

    assert lab_of(3).launch(check, "same") == [None] * 3
    with pytest.raises(gl.RankFailed, match=r"all are the same") as caught:
        lab_of(3).launch(check, None)
    assert "[0, 1, 2], by rank" in str(caught.value)


def wait_for(what, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None and time.monotonic() < deadline, "the job ended or hangs"
        time.sleep(0.05)


CLOCK_SHIFT_S = 86400
HEARTBEATS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"


def launch(host, store, config, log, nodes="2"):
    """torchrun on one of two hosts, which find each other through the first."""
    return host.start(
        *TORCHRUN,
        *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "gpt", "--rdzv-endpoint", f"{store.address}:29400"),
        *("--rdzv-conf", f"is_host={int(host is store)},{HEARTBEATS}"),
        *("--local-addr", host.address, "-m", "gpipe_lab.train", "--config", str(config)),
        out=log,
    )


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("replaced", [True, False])
def test_a_host_cut_off_in_the_middle(undisturbed, tmp_path, replaced):
    """Its cable is pulled and another host takes its place; or it dies and the first goes on alone."""
    config, folder = write_config(tmp_path, "state", timeout_s=5)
    log = tmp_path / "log"
    nodes = "2" if replaced else "1:2"
    with two_hosts(shift_s=CLOCK_SHIFT_S) as (first, second), log.open("wb") as out:
        job = launch(first, first, config, out, nodes)
        launch(second, first, config, out, nodes)
        wait_for(lambda: saves(folder), job)
        if replaced:
            second.connect(up=False)  # no goodbye gets through: the first finds out by its own timeout
        second.kill()
        wait_for(lambda: "Traceback" in log.read_text(), job)
        steps_at_the_cut = losses(log.read_text())
        if replaced:
            second.connect()
            launch(second, first, config, out, nodes)
        assert job.wait(60) == 0, log.read_text()
    printed = log.read_text()
    assert max(steps_at_the_cut) < NUM_STEPS
    assert printed.count("from the start") == 1
    assert re.search(rf"P = {2 if replaced else 1}, .*; resumed after step \d+", printed)
    found, weights = undisturbed
    assert losses(printed) == found
    assert same(gl.load_weights(folder), weights)
    check_one_clock(printed, folder.with_suffix(".json"), shifted=bool(second.shift))


def check_one_clock(printed, trace, *, shifted):
    """No message of the traced step arrives before it was sent, though the hosts' clocks are a day apart."""
    bound_ms = float(re.search(r"clocks of the ranks within (\S+) ms", printed)[1])
    assert 0 < bound_ms < 50
    events = json.loads(trace.read_text())["traceEvents"]
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == 8 and all(ends[i] >= starts[i] - 1000 * bound_ms for i in starts)
    span_ms = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1000
    assert span_ms < 5000, f"clocks shifted: {shifted}"

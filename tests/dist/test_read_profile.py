"""gl.read_profile: a trace from what torch.profiler wrote of a pipeline; torch's own schedules, and ours."""

from __future__ import annotations

import gzip
import json
import sys
import time
from functools import partial

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.profiler import ProfilerActivity, profile

import gpipe_lab as gl
from gpipe_lab.__main__ import INVALID, USAGE, VALID, main
from gpipe_lab.plan.torch_profile import read_profile
from gpipe_lab.tools.torch_pipeline import TORCH_SCHEDULES

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, ROWS, M = 64, 16, 6
SLEEP_S = 0.004


class Slow(nn.Module):
    """Two products, and a rest between them."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        time.sleep(self.seconds)
        return self.second(x)


def train(context, name, folder, num_steps, slow):
    """Steps of torch's own schedule, all in one profile; the order that torch gives each rank, if it says."""
    schedule = gl.SCHEDULES[name](context.num_ranks, M)
    torch.manual_seed(context.rank)
    stages = [
        PipelineStage(Slow(SLEEP_S * (s == slow)), s, schedule.num_stages, torch.device("cpu"))
        for s in schedule.stages_of(context.rank)
    ]
    several = issubclass(TORCH_SCHEDULES[name], PipelineScheduleMulti)
    torchs = TORCH_SCHEDULES[name](stages if several else stages[0], n_microbatches=M, loss_fn=F.mse_loss)
    x = torch.randn(M * ROWS, WIDTH)
    arguments = (x,) if 0 in schedule.stages_of(context.rank) else ()
    is_last = schedule.num_stages - 1 in schedule.stages_of(context.rank)
    options = {"target": x} if is_last else {}
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.01)

    def step():
        optimizer.zero_grad()
        torchs.step(*arguments, **options)
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(num_steps):
            step()
    recorded.export_chrome_trace(f"{folder}/rank{context.rank}.json")
    order = getattr(torchs, "pipeline_order", None)
    return [str(action) for action in order[context.rank] if action is not None] if order else None


def files_of(lab, name, folder, *, num_steps=1, slow=1):
    orders = lab.launch(train, name, str(folder), num_steps, slow)
    return sorted(folder.glob("rank*.json")), orders


@pytest.fixture
def profiles(lab_of, tmp_path):
    """A function: the files of a step of torch's schedule."""
    return lambda name, num_ranks, **options: files_of(lab_of(num_ranks), name, tmp_path, **options)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_torchs_single_stage_schedules(profiles, name, num_ranks):
    files, _ = profiles(name, num_ranks)
    trace = read_profile(files)
    as_torch_runs_it = {"gpipe": partial(gl.gpipe, backward="fifo"), "one_f_one_b": gl.one_f_one_b}[name](
        num_ranks, M
    )
    assert trace.schedule.ops == as_torch_runs_it.ops
    assert trace.source == "measured" and trace.schedule.stage_to_rank == tuple(range(num_ranks))


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble_h1", "zero_bubble_v"])
def test_torchs_multi_stage_schedules(profiles, name):
    files, orders = profiles(name, 2)
    trace = read_profile(files)
    assert [[str(op) for op in row] for row in trace.schedule.ops] == orders
    assert trace.schedule.stage_to_rank == gl.SCHEDULES[name](2, M).stage_to_rank


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble_v"])
def test_operations_last_as_long_as_they_compute(profiles, name):
    """Of a stage that rests in its forward, every forward takes so long, and no other operation does."""
    files, _ = profiles(name, 2)
    trace = read_profile(files)
    for event in trace.computations:
        is_slow = event.op.kind is gl.Kind.F and event.op.stage == 1
        assert (event.duration_ms >= 1000 * SLEEP_S) == is_slow, event
    first = trace.speed_ups().iloc[0]
    assert (first["stage"], first["what"]) == (1, "forward")
    shorter = trace.speed_ups(faster=0.2).iloc[0]["gain (ms)"]
    assert shorter == pytest.approx(2 * first["gain (ms)"], rel=0.1)
    assert 0 < trace.bubble_fraction < 1 and gl.take_apart(trace).idle_ms > 0
    assert trace.critical_path().steps[-1].end_ms == pytest.approx(trace.start_ms + trace.makespan_ms)


def test_clocks_of_different_hosts_are_brought_together(profiles):
    files, _ = profiles("one_f_one_b", 3)
    together = read_profile(files)
    for rank, path in enumerate(files):
        document = json.loads(path.read_text())
        document["baseTimeNanoseconds"] += rank * 3_000_000_000
        document["host_name"] = f"node{rank}"
        path.write_text(json.dumps(document))
    apart = read_profile(files)
    assert apart.schedule == together.schedule
    assert apart.makespan_ms == pytest.approx(together.makespan_ms, rel=0.2)
    ended = {event.op: event.end_ms for event in apart.computations}
    for event in apart.computations:
        for needed in gl.dependencies(event.op, apart.schedule):
            assert ended[needed] <= event.start_ms + 0.1


def test_files_of_different_steps_are_told_apart(profiles, tmp_path):
    files, _ = profiles("gpipe", 2, num_steps=2)
    first, last = read_profile(files, step=0), read_profile(files)
    assert first.schedule == last.schedule == read_profile(files, step=1).schedule
    assert first.events != last.events
    with pytest.raises(gl.InputError, match="has recorded the step"):
        read_profile(files, step=2)
    document = json.loads(files[1].read_text())
    document["baseTimeNanoseconds"] -= 200_000_000
    files[1].write_text(json.dumps(document))
    shifted = read_profile(files)  # a clock that is wrong all along is only another clock
    assert shifted.makespan_ms == pytest.approx(last.makespan_ms, rel=0.3)
    for event in document["traceEvents"]:
        if event["name"] == "Backward 0":
            event["ts"] -= 500_000
    files[1].write_text(json.dumps(document))
    with pytest.raises(gl.InputError):
        read_profile(files)


def test_this_packages_own_profiles(lab_of, tmp_path):
    layers = [nn.Linear(6, 6) for _ in range(4)]
    x = torch.randn(6, 6)
    pace = gl.Pace(forward_ms=5, backward_ms=10)
    run = lab_of(2).run(
        gl.one_f_one_b(2, 3), layers, x, x, loss_fn=F.mse_loss, checkpoint="always", pace=pace, profile=True
    )
    trace = read_profile(run.profiles.save(tmp_path / "kept"))
    assert [[e.op for e in run.trace.computations if e.rank == rank] for rank in range(2)] == [
        list(row) for row in trace.schedule.ops
    ]
    assert trace.makespan_ms <= run.trace.makespan_ms


def test_a_compressed_file_and_a_pattern(profiles, tmp_path):
    files, _ = profiles("interleaved", 2)
    plain = read_profile(str(tmp_path / "rank*.json"))
    for path in files:
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_profile(tmp_path.glob("*.gz")) == plain


def test_a_page_and_a_picture(profiles, tmp_path, capsys):
    files, _ = profiles("one_f_one_b", 2)
    names = [str(path) for path in files]
    assert main(["show", *names]) == VALID
    said = capsys.readouterr().out
    assert (
        "2 ranks" in said and "to make quicker first: forward of stage 1" in said and "critical path" in said
    )
    assert main(["show", *names, "-o", str(tmp_path / "page.html")]) == VALID
    assert main(["show", *names, "-o", str(tmp_path / "step.png")]) == VALID
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "page.html").read_text()
    found = gl.report(read_profile(files), path=tmp_path / "again.html")
    assert found.path.read_text() == page
    assert "What to make quicker" in page and page.count("<figure>") == 2
    assert "to make quicker first" in str(found)
    assert main(["show", names[0]]) == INVALID
    assert main(["show", "no/such.json"]) == INVALID
    assert main(["show", "gpipe", "4", "8", "-o", str(tmp_path / "x.html")]) == USAGE
    assert main(["show", "gpipe", "four"]) == USAGE

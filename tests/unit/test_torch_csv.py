"""torch.distributed.pipelining's CSV, read and written, beside torch's own schedules and its own parser."""

import csv
import io

import pytest
import torch
from plan_oracle import authored, can_run, is_complete
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

import gpipe_lab as gl

Parsed = dict[int, list]


class Stage(_PipelineStageBase):
    """What torch's schedules ask of a stage before they run: numbers, no process group."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank, self.group = num_ranks, 0, None
        self.submod = torch.nn.Identity()

    def _unused(self, *args):
        raise AssertionError("nothing is run")

    _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = _unused


def built(name: str, p: int, m: int, chunks: int) -> tuple[Parsed, Parsed | None]:
    """torch's own listing of a schedule: computation alone, and with communication where it makes one."""
    make = torch_schedules.get_schedule_class(name)
    stages = [Stage(i, p * chunks, p) for i in range(chunks)]
    if issubclass(make, torch_schedules.PipelineScheduleSingle):
        return make(stages[0], m)._get_pipeline_order(), None
    schedule = make(stages, m)
    return schedule.pipeline_order, schedule.pipeline_order_with_comms


def dumped(order: Parsed) -> str:
    """As torch's _dump_csv writes it."""
    text = io.StringIO()
    for rank in order:
        csv.writer(text).writerow(order[rank])
    return text.getvalue()


def parsed(text: str) -> Parsed:
    """As torch's _load_csv reads it."""
    rows = csv.reader(io.StringIO(text))
    return {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


COUNTERPARTS = [
    ("GPipe", 1, lambda p, m: gl.gpipe(p, m, backward="fifo")),
    ("InterleavedZeroBubble", 1, gl.zero_bubble_h1),
    ("ZBVZeroBubble", 2, gl.zero_bubble_v),
    ("Interleaved1F1B", 2, gl.interleaved),
    ("Interleaved1F1B", 3, lambda p, m: gl.interleaved(p, m, 3)),
]


@pytest.mark.parametrize(("name", "chunks", "ours"), COUNTERPARTS)
def test_torch_s_schedules_are_read_and_equal_ours(name, chunks, ours):
    for p, m in [(1, 2), (2, 2), (2, 6), (3, 3), (3, 9), (4, 4), (4, 8)]:
        order, comms = built(name, p, m, chunks)
        schedule = gl.from_csv(dumped(order))
        assert (schedule.ops, schedule.stage_to_rank) == (ours(p, m).ops, ours(p, m).stage_to_rank)
        if comms is not None:
            assert gl.from_csv(dumped(comms)) == schedule  # without the communication


@pytest.mark.parametrize(
    ("name", "chunks"), [("LoopedBFS", 2), ("DualPipeV", 2), ("InterleavedZeroBubble", 2)]
)
def test_torch_s_other_schedules_are_read_and_can_run(name, chunks):
    for p, m in [(2, 4), (3, 6), (4, 8), (4, 9 if name == "DualPipeV" else 12)]:
        order, comms = built(name, p, m, chunks)
        schedule = gl.from_csv(dumped(order), name=name)
        assert is_complete(schedule) and can_run(schedule) and can_run(gl.lower(schedule))
        assert schedule.name == name and schedule.num_microbatches == m
        with_comms = gl.from_csv(dumped(comms), comms=True)  # torch's own order of transfers cannot hang
        assert can_run(with_comms)
        assert any(op.kind is gl.Kind.SEND_F for op in with_comms.ops[0])


def test_torch_s_listing_of_1f1b_is_refused_with_the_reason():
    for p, m in [(1, 4), (2, 4), (4, 8), (5, 5)]:
        order, _ = built("1F1B", p, m, 1)
        with pytest.raises(gl.ScheduleError) as caught:
            gl.from_csv(dumped(order), name="torch's 1F1B")
        error = caught.value
        assert error.got == f"no {p - 1}F0, but {p - 1}F{m}"
        assert f"rank {p - 1}" in error.where and "torch's 1F1B" in error.where
        assert f">>F{m}<<" in error.grid
        order[p - 1] = [
            action._replace(microbatch_index=action.microbatch_index - 1) if "F" in str(action) else action
            for action in order[p - 1]
        ]
        assert gl.from_csv(dumped(order)).ops == gl.one_f_one_b(p, m).ops  # numbered from 0 it is 1F1B


EVERY = [
    gl.naive(3, 2),
    gl.forward_only(3, 4),
    gl.gpipe(4, 3),
    gl.one_f_one_b(3, 5),
    gl.interleaved(2, 4, 3),
    gl.zero_bubble_h1(4, 6),
    gl.zero_bubble_h2(3, 5),
    gl.zero_bubble_v(3, 4),
    gl.gpipe(1, 1),
]


@pytest.mark.parametrize("schedule", EVERY, ids=lambda s: f"{s.name} {s.num_stages}")
def test_what_is_written_torch_reads_and_so_do_we(schedule, tmp_path):
    path = tmp_path / "schedule.csv"
    text = gl.to_csv(schedule, path)
    assert path.read_bytes().decode() == text
    actions = parsed(text)
    ours = [list(map(str, row)) for row in schedule.ops]
    assert [list(map(str, actions[rank])) for rank in actions] == ours
    assert dumped(actions) == text
    if schedule.trains:
        counts = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        home = torch_schedules._validate_schedule(actions, *counts)
        assert tuple(home[stage] for stage in range(schedule.num_stages)) == schedule.stage_to_rank
    for source in (text, path, str(path)):
        assert gl.from_csv(source, name=schedule.name) == schedule


@pytest.mark.parametrize("schedule", EVERY[2:8], ids=lambda s: s.name)
def test_lowered_schedules_go_to_torch_and_back(schedule):
    for hoist in (0, 2, 99):
        lowered = gl.lower(schedule, hoist=hoist)
        text = gl.to_csv(lowered)
        assert gl.from_csv(text, name=schedule.name, comms=True) == lowered
        assert gl.from_csv(text, name=schedule.name) == schedule
        home = schedule.stage_to_rank
        torch_schedules._simulate_comms_compute(parsed(text), home.__getitem__, len(home))  # raises if stuck


def test_empty_cells_and_lines_are_nothing():
    text = "\n0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1,,1REDUCE_GRAD\n\n"
    assert gl.from_csv(text).ops == gl.gpipe(2, 2, backward="fifo").ops


def test_recompute_has_no_counterpart():
    with pytest.raises(gl.InputError, match="no recompute") as caught:
        gl.to_csv(gl.with_recompute(gl.gpipe(2, 2), "always"))
    assert "0R1" in caught.value.got
    with pytest.raises(gl.ScheduleError):
        gl.to_csv(authored("0B0 0F0"))


@pytest.mark.parametrize(
    ("text", "error", "rule", "got"),
    [
        ("0F0,0X0", gl.InputError, "one of torch's operations", "'0X0'"),
        ("0F0,hello", gl.InputError, "one of torch's operations", "'hello'"),
        ("0F0,0B0.1", gl.InputError, "one of torch's operations", "'0B0.1'"),
        ("0F0,0R0", gl.InputError, "one of torch's operations", "'0R0'"),
        ("(0F0;0Q0)OVERLAP_F_B,0B0", gl.InputError, "one of torch's operations", "'(0F0;0Q0)OVERLAP_F_B'"),
        (",", gl.InputError, "a row of operations for every rank", "no operation"),
        ("0F0,1B0\n1F0,0B0", gl.InputError, "every stage is on one rank", "stage 0 of 2 on ranks [0, 1]"),
        ("0F0,0B0\n2F0,2B0", gl.InputError, "every stage is on one rank", "stage 1 of 3 on none"),
        ("0F0,0B0\n1F0", gl.ScheduleError, "once backward", "no 1B0"),
        ("0F0,0F0,0B0", gl.ScheduleError, "each operation is there once", "0F0 2 times"),
        ("0B0,0F0", gl.ScheduleError, "an operation comes after what it needs", "0B0 before 0F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", gl.ScheduleError, "no rank may wait", "a circle"),
        ("0F1,0B1", gl.ScheduleError, "counted from 0", "no 0F0, but 0F1"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", gl.ScheduleError, "every send has its receive", "no 1RECV_F0"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(text, error, rule, got):
    with pytest.raises(error, match=rule) as caught:
        gl.from_csv(text, comms=True)
    assert got in caught.value.got


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        gl.from_csv("no_such_schedule.csv")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_as_a_spreadsheet_saves_it(tmp_path, encoding):
    schedule = gl.one_f_one_b(2, 3)
    path = tmp_path / "schedule.csv"
    path.write_text(gl.to_csv(schedule), encoding=encoding)
    assert gl.from_csv(path).ops == schedule.ops
    assert gl.from_csv("\ufeff" + gl.to_csv(schedule)).ops == schedule.ops
    path.write_bytes(b"0F0,\xff\x800B0")
    with pytest.raises(gl.InputError, match="UTF-8"):
        gl.from_csv(path)

import dataclasses
import doctest
import pickle
import time

import numpy as np
import pytest
from plan_oracle import GRIDS, LARGE, B, F, can_run, needed

import gpipe_lab as gl
from gpipe_lab import Kind, Op
from gpipe_lab.plan import formulas, schedules

TRAINING = ["naive", "gpipe", "one_f_one_b"]


def every_op(num_stages, num_microbatches, kinds):
    return {Op(k, s, m) for k in kinds for s in range(num_stages) for m in range(num_microbatches)}


def test_the_pictures_in_the_docstrings_are_true():
    found = doctest.testmod(schedules)
    assert (found.failed, found.attempted) == (0, len(gl.SCHEDULES) + 1)


@pytest.mark.parametrize("make", [gl.interleaved, gl.zero_bubble_v], ids=lambda make: make.__name__)
def test_forwards_go_down_any_placement(make):
    for p, m in GRIDS:
        place = make(p, m * p).stage_to_rank
        schedule = gl.forward_only(len(place), m, stage_to_rank=place)
        gl.validate(gl.lower(schedule))
        assert gl.simulate(schedule).makespan_ms >= len(place) + m - 1
        assert {op for row in schedule.ops for op in row} == every_op(len(place), m, (F,))


def test_dependencies_follow_their_definition():
    for p, m in [(1, 1), (3, 4), (4, 3)]:
        for name in TRAINING:
            schedule = gl.SCHEDULES[name](p, m)
            variants = [schedule, gl.with_recompute(schedule, "except_last")]
            variants.append(gl.with_recompute(schedule, "every:2", early=True, layers_per_stage=5))
            for variant in variants:
                for row in variant.ops:
                    for op in row:
                        assert set(gl.dependencies(op, variant)) == needed(op, variant)


def test_the_gpipe_grid_of_four_by_four_to_the_letter():
    assert str(gl.gpipe(4, 4)).splitlines() == [
        "F0 F1 F2 F3 . . . . . . B3 B2 B1 B0",
        ". F0 F1 F2 F3 . . . . B3 B2 B1 B0 .",
        ". . F0 F1 F2 F3 . . B3 B2 B1 B0 . .",
        ". . . F0 F1 F2 F3 B3 B2 B1 B0 . . .",
    ]
    assert len(str(gl.gpipe(4, 4)).splitlines()[0].split()) == 14
    trace = gl.simulate(gl.gpipe(4, 4), gl.Costs(forward=1, backward=1))
    assert max(e.end_ms for e in trace.computations if e.op.kind is F) == 7
    assert [op.short for op in gl.gpipe(4, 4).ops[2][4:]] == ["B3", "B2", "B1", "B0"]


def test_all_four_stages_work_only_at_two_slots():
    columns = list(zip(*gl.gpipe(4, 4).cells(), strict=True))
    assert [t for t, column in enumerate(columns) if "." not in column] == [3, 10]


def test_naive_is_a_staircase():
    for p in range(1, 9):
        cells = gl.naive(p).cells()
        assert {len(row) for row in cells} == {2 * p}
        for k, row in enumerate(cells):
            assert {t: cell for t, cell in enumerate(row) if cell != "."} == {k: "F0", 2 * p - 1 - k: "B0"}


def test_naive_never_keeps_two_ranks_busy():
    for p, m in GRIDS:
        columns = zip(*gl.naive(p, m).cells(), strict=True)
        assert all(sum(cell != "." for cell in column) == 1 for column in columns)


def test_idle_slots_of_gpipe_are_at_start_middle_and_end():
    for p, m in GRIDS:
        for k, row in enumerate(gl.gpipe(p, m).cells()):
            busy = ["F"] * m, ["B"] * m
            shape = [cell[0] for cell in row]
            assert shape == ["."] * k + busy[0] + ["."] * 2 * (p - 1 - k) + busy[1] + ["."] * k


def test_the_aligned_grid_has_the_same_cells():
    schedule = gl.gpipe(2, 12)
    lines = schedule.grid().splitlines()
    assert [line.split() for line in lines] == schedule.cells()
    assert lines[0].index("F10") == lines[1].index("F9")


def test_in_flight():
    for p, m in GRIDS + LARGE:
        assert gl.peak_in_flight(gl.gpipe(p, m)) == (m,) * p
        assert gl.peak_in_flight(gl.naive(p, m)) == (1,) * p
        assert gl.peak_in_flight(gl.one_f_one_b(p, m)) == tuple(min(p - k, m) for k in range(p))
        assert gl.peak_in_flight(gl.forward_only(p, m)) == (0,) * p
        for name in [*TRAINING, "forward_only"]:
            closed = tuple(formulas.peak_in_flight(name, p, m, k) for k in range(p))
            assert closed == gl.peak_in_flight(gl.SCHEDULES[name](p, m))


def test_in_flight_of_a_split_backward_lasts_until_its_weights():
    ops = tuple(map(Op.parse, "0F0 0I0 0F1 0W0 0I1 0W1".split()))
    assert gl.in_flight(gl.Schedule("split", 2, (0,), (ops,)), 0) == (1, 1, 2, 1, 1, 0)


def test_in_flight_with_segments_lasts_until_the_last_of_them():
    schedule = gl.with_recompute(gl.gpipe(1, 2), "every:1", layers_per_stage=2)
    assert gl.in_flight(schedule, 0) == (1, 2, 2, 2, 2, 1, 1, 1, 1, 0)


@pytest.mark.parametrize("name", list(gl.SCHEDULES))
@pytest.mark.parametrize("bad", [0, -1, True, False, 2.0, "2", None, np.bool_(True), float("nan"), [2]])
def test_counts_are_whole_numbers_of_at_least_one(name, bad):
    for arguments in [(bad, 2), (2, bad)]:
        with pytest.raises(gl.InputError) as caught:
            gl.SCHEDULES[name](*arguments)
        assert repr(bad) in caught.value.got
        assert name in caught.value.where
        assert caught.value.rule and caught.value.remedy


def test_numpy_counts_are_counts():
    assert gl.gpipe(np.int64(2), np.int32(3)) == gl.gpipe(2, 3)
    assert type(gl.gpipe(2, np.int64(3)).num_microbatches) is int
    gl.validate(gl.gpipe(np.int64(2), np.int32(3)))


def test_what_builds_on_a_schedule_or_a_trace_is_a_method_too():
    schedule = gl.one_f_one_b(2, 3)
    schedule.validate()
    assert schedule.lower(hoist=0) == gl.lower(schedule, hoist=0)
    assert schedule.with_recompute("always") == gl.with_recompute(schedule, "always")
    assert schedule.peak_in_flight() == gl.peak_in_flight(schedule)
    assert schedule.to_csv() == gl.to_csv(schedule)
    trace = gl.simulate(schedule)
    assert trace.critical_path() == gl.critical_path(trace)
    with pytest.raises(gl.ScheduleError, match="no 0B2"):
        dataclasses.replace(schedule, ops=(schedule.ops[0][:-1], schedule.ops[1])).validate()


def test_a_schedule_is_a_value():
    assert gl.gpipe(3, 4) == gl.gpipe(3, 4)
    assert hash(gl.gpipe(3, 4)) == hash(gl.gpipe(3, 4))
    assert gl.gpipe(3, 4) != gl.gpipe(3, 5)


def test_pickle_sends_the_fields_alone():
    schedule = gl.gpipe(4, 8)
    fresh = len(pickle.dumps(schedule))
    gl.simulate(schedule)
    assert len(pickle.dumps(schedule)) == fresh
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert gl.simulate(again).events == gl.simulate(schedule).events


def test_operations_print_and_parse():
    for kind in Kind:
        for op in (Op(kind, 0, 0), Op(kind, 12, 34), Op(kind, 2, 0, 3)):
            assert Op.parse(str(op)) == op
    assert str(Op(F, 2, 0)) == "2F0"
    for text in ["", "F0", "2X0", "-1F0", "2F", "2F0 ."]:
        with pytest.raises(ValueError, match="not an operation"):
            Op.parse(text)


def test_several_stages_on_a_rank_print_their_stage():
    schedule = gl.Schedule("loop", 1, (0, 0), ((Op(F, 0, 0), Op(F, 1, 0)),))
    assert str(schedule) == "0F0 1F0"


def test_a_schedule_that_cannot_run_still_prints():
    backwards = gl.Schedule("odd", 1, (0,), ((Op(B, 0, 0), Op(F, 0, 0)),))
    assert str(backwards) == "B0 F0"
    assert str(gl.Schedule("empty", 1, (), ())) == ""
    assert str(gl.Schedule("empty", 1, (0,), ((),))) == ""


def test_recompute_goes_where_the_mode_says():
    gpipe = gl.gpipe(1, 3)
    row = {mode: str(gl.with_recompute(gpipe, mode)) for mode in ("never", "always", "except_last")}
    assert row["never"] == "F0 F1 F2 B2 B1 B0"
    assert row["always"] == "F0 F1 F2 R2 B2 R1 B1 R0 B0"
    assert row["except_last"] == "F0 F1 F2 B2 R1 B1 R0 B0"
    every = gl.with_recompute(gl.gpipe(1, 1), "every:2", layers_per_stage=5)
    assert str(every) == "F0 R0.2 B0.2 R0.1 B0.1 R0 B0"
    uneven = gl.with_recompute(gl.gpipe(2, 1), "every:2", layers_per_stage=[2, 3])
    assert [row[1:] for row in uneven.ops] == [
        tuple(map(Op.parse, "0R0 0B0".split())),
        tuple(map(Op.parse, "1R0.1 1B0.1 1R0 1B0".split())),
    ]
    assert gl.with_recompute(gl.forward_only(2, 2), "always") == gl.forward_only(2, 2)


def test_recomputes_number_m_or_one_fewer():
    for p, m in GRIDS:
        for mode, count in [("never", 0), ("always", m), ("except_last", m - 1)]:
            schedule = gl.with_recompute(gl.gpipe(p, m), mode)
            assert [sum(op.kind is Kind.R for op in row) for row in schedule.ops] == [count] * p


@pytest.mark.parametrize("mode", ["", "every:0", "every:", "every:-1", "every:1.5", None, 1, [], "ALWAYS"])
def test_unknown_checkpoint_modes_are_refused(mode):
    with pytest.raises(gl.InputError, match="checkpoint is"):
        gl.with_recompute(gl.gpipe(2, 2), mode)


@pytest.mark.parametrize("layers", [None, 0, -1, True, 1.5, [1], [1, 0], [1, 2, 3], "ab", [1.0, 2]])
def test_layers_per_stage_is_checked(layers):
    with pytest.raises(gl.InputError, match="layers"):
        gl.with_recompute(gl.gpipe(2, 2), "every:2", layers_per_stage=layers)


def test_a_schedule_with_recompute_takes_no_mode():
    schedule = gl.with_recompute(gl.gpipe(2, 2), "always")
    assert gl.with_recompute(schedule, "never") is schedule
    with pytest.raises(gl.InputError, match="already holds R"):
        gl.with_recompute(schedule, "always")


def test_closed_forms():
    table = [round(100 * formulas.bubble_fraction(8, m), 1) for m in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert table == [87.5, 77.8, 63.6, 46.7, 30.4, 17.9, 9.9, 5.2]
    assert formulas.microbatches_for(0.7, 8) == pytest.approx(49 / 3)
    assert formulas.microbatches_for(0.8, 8) == pytest.approx(28)
    fraction, overhead = formulas.bubble_fraction(4, 7), formulas.bubble_overhead(4, 7)
    assert fraction == pytest.approx(0.3) and overhead == pytest.approx(3 / 7)
    assert fraction / (1 - fraction) == pytest.approx(overhead)
    assert formulas.laundry_minutes([30, 60, 20], 5) == 110 + 4 * 60


def test_gpipe_first_in_first_out():
    assert str(gl.gpipe(2, 3, backward="fifo")).splitlines() == [
        "F0 F1 F2 . . B0 B1 B2",
        ". F0 F1 F2 B0 B1 B2 .",
    ]
    assert gl.gpipe(3, 4, backward="reversed") == gl.gpipe(3, 4)
    for p, m in GRIDS[::5]:
        fifo, reverse = gl.gpipe(p, m, backward="fifo"), gl.gpipe(p, m)
        assert can_run(gl.lower(fifo))
        assert gl.peak_in_flight(fifo) == gl.peak_in_flight(reverse) == (m,) * p
        assert gl.simulate(fifo).makespan_ms == gl.simulate(reverse).makespan_ms
    for bad in ("lifo", None, True, 1):
        with pytest.raises(gl.InputError, match="first in, first out"):
            gl.gpipe(2, 2, backward=bad)


@pytest.mark.alone
def test_building_a_large_schedule_is_quick():
    start = time.perf_counter()
    gl.gpipe(32, 512)
    assert time.perf_counter() - start < 1

import random

import pytest
from plan_oracle import GRIDS, LARGE, B, F, I, R, interleaved, random_schedule

import gpipe_lab as gl
from gpipe_lab import Costs, MemoryReport, MemoryRow, Op, StageBytes

SAVED, BOUNDARY = 1000, 70


def report(schedule, *, saved=SAVED, boundary=BOUNDARY, weights=None, costs=None):
    sizes = [StageBytes(saved=saved, boundary=boundary, weights=weights or {})] * schedule.num_stages
    return gl.simulate_memory(gl.simulate(schedule, costs), sizes)


def test_peaks_without_checkpointing():
    for p, m in GRIDS + LARGE[:3]:
        for name, held in [
            ("naive", [1] * p),
            ("gpipe", [m] * p),
            ("one_f_one_b", [min(p - k, m) for k in range(p)]),
            ("forward_only", [0] * p),
        ]:
            memory = report(gl.SCHEDULES[name](p, m))
            for k in range(p):
                assert memory.peak_bytes(k) == held[k] * SAVED
                assert memory.peak_bytes(k, "saved") == held[k] * SAVED
                assert memory.peak_bytes(k, "boundary") == 0


@pytest.mark.parametrize("early", [False, True])
def test_peak_with_always(early):
    for p, m in GRIDS:
        memory = report(gl.with_recompute(gl.gpipe(p, m), "always", early))
        for k in range(p):
            assert memory.peak_bytes(k) == m * BOUNDARY + (SAVED - BOUNDARY)
            assert memory.peak_bytes(k, "boundary") == m * BOUNDARY
            assert memory.peak_bytes(k, "recomputed") == SAVED - BOUNDARY
            assert memory.peak_bytes(k, "saved") == 0


def test_peak_of_several_categories_is_that_of_one_moment():
    memory = report(gl.with_recompute(gl.gpipe(2, 3), "except_last"))
    together = memory.peak_bytes(0, ("boundary", "recomputed", "saved"))
    assert together == memory.peak_bytes(0) == 2 * BOUNDARY + SAVED
    assert together < sum(memory.peak_bytes(0, name) for name in ("boundary", "recomputed", "saved"))
    assert memory.peak(0, ("saved", "boundary")).op == Op.parse("0F2")


def test_peak_with_except_last():
    for p, m in GRIDS:
        memory = report(gl.with_recompute(gl.gpipe(p, m), "except_last"))
        for k in range(p):
            assert memory.peak_bytes(k) == (m - 1) * BOUNDARY + SAVED


def test_peak_with_segments():
    # four layers a stage, an input kept for every two of them
    schedule = gl.with_recompute(gl.gpipe(3, 4), "every:2", layers_per_stage=4)
    memory = report(schedule)
    for k in range(3):
        assert memory.peak_bytes(k, "boundary") == 4 * 2 * BOUNDARY
        assert memory.peak_bytes(k, "recomputed") == SAVED // 2 - BOUNDARY
        assert memory.peak_bytes(k) == 4 * 2 * BOUNDARY + SAVED // 2 - BOUNDARY


def test_recompute_in_one_f_one_b():
    for p, m in GRIDS[::3]:
        memory = report(gl.with_recompute(gl.one_f_one_b(p, m), "always"))
        for k in range(p):
            assert memory.peak_bytes(k) == min(p - k, m) * BOUNDARY + (SAVED - BOUNDARY)


def test_everything_is_given_back():
    rng = random.Random(1)
    for kind in ("F", "B", "IW", "RB", "RB2"):
        for place in [(0, 1, 2), (0, 1, 1, 0)]:
            schedule = random_schedule(rng, place, 3, kind)
            memory = report(schedule, weights={"parameters": 5})
            for rank in range(schedule.num_ranks):
                left = memory.moments(rank)[-1].bytes
                weights = 5 * len(schedule.stages_of(rank))
                assert left["parameters"] == weights == sum(left.values())
                assert all(v >= 0 for moment in memory.moments(rank) for v in moment.bytes.values())


def test_saved_bytes_follow_the_micro_batches_in_flight():
    rng = random.Random(2)
    for kind in ("B", "IW"):
        for place in [(0, 1, 2), (0, 1, 1, 0), (0, 0)]:
            schedule = random_schedule(rng, place, 4, kind)
            memory = report(schedule)
            for rank in range(schedule.num_ranks):
                held = tuple(m.bytes.get("saved", 0) // SAVED for m in memory.moments(rank))
                counts = zip(schedule.ops[rank], gl.in_flight(schedule, rank), strict=True)
                assert held == tuple(count for op, count in counts if op.kind is not I)  # I frees nothing
            assert tuple(memory.peak_bytes(r) // SAVED for r in memory.ranks) == gl.peak_in_flight(schedule)


def test_several_stages_on_a_rank_add_up():
    schedule = interleaved(2, 4, 2)
    sizes = [StageBytes(saved=s, boundary=1, weights={"parameters": s}) for s in (10, 20, 40, 80)]
    memory = gl.simulate_memory(gl.simulate(schedule), sizes)
    assert memory.moments(0)[0].bytes["parameters"] == 50
    assert memory.moments(1)[0].bytes["parameters"] == 100


def test_weights_stay_and_count():
    weights = {"parameters": 100, "gradients": 100, "optimizer": 200}
    memory = report(gl.gpipe(2, 3), weights=weights)
    assert memory.peak_bytes(0) == 400 + 3 * SAVED
    assert memory.peak_bytes(0, "optimizer") == 200
    first = memory.moments(0)[0]
    assert first.op is None and first.total == 400


def test_the_peak_is_the_first_moment_that_holds_most():
    memory = report(gl.gpipe(2, 3))
    peak = memory.peak(0)
    assert peak.op == Op(F, 0, 2) and peak.op_index == 2 and peak.time_ms == 3.0
    assert memory.peak(0, "saved") == peak
    always = report(gl.with_recompute(gl.gpipe(2, 3), "always"))
    assert always.peak(0).op == Op(R, 0, 2)
    assert always.peak(0, "boundary").op == Op(F, 0, 2)
    naive = report(gl.naive(2, 3))
    assert naive.peak(1).op == Op(F, 1, 0)  # reached three times, first by micro-batch 0


def test_a_report_made_by_hand():
    rows = (
        MemoryRow(1, 0, 0.0, "parameters", 10),
        MemoryRow(0, 0, 0.0, "parameters", 5),
        MemoryRow(1, 1, 1.0, "saved", 7, Op(F, 1, 0)),
        MemoryRow(1, 1, 1.0, "outputs", 2, Op(F, 1, 0)),
        MemoryRow(1, 2, 2.0, "outputs", 9, Op(B, 1, 0)),
        MemoryRow(1, 2, 2.0, "saved", 0, Op(B, 1, 0)),
    )
    memory = MemoryReport(rows, "measured", 64)
    assert memory.ranks == (0, 1)
    assert [m.total for m in memory.moments(1)] == [10, 19, 19]  # changes at one time count together
    assert memory.peak(1).op == Op(F, 1, 0)
    assert memory.peak(1, "outputs").op == Op(B, 1, 0)
    assert memory.peak_bytes(1, "saved") == 7 and memory.peak_bytes(0) == 5
    assert memory.peak_bytes(7) == 0 and memory.moments(7) == ()
    assert memory.peak_bytes(0, "deferred") == 0
    frame = memory.frame()
    assert list(frame.columns) == ["rank", "op_index", "time_ms", "category", "bytes", "op"]
    assert list(frame.op) == ["", "", "1F0", "1F0", "1B0", "1B0"]


def test_an_empty_report():
    memory = MemoryReport((), "measured")
    assert memory.ranks == () and memory.peak_bytes(0) == 0 and len(memory.frame()) == 0


def test_memory_is_on_the_trace_s_clock():
    schedule = gl.gpipe(3, 2)
    trace = gl.simulate(schedule, Costs(forward=4, backward=6))
    memory = gl.simulate_memory(trace, [StageBytes(saved=SAVED, boundary=BOUNDARY)] * 3)
    ends = {(e.rank, e.op): e.end_ms for e in trace.computations}
    assert all(row.time_ms == ends[row.rank, row.op] for row in memory.rows if row.op is not None)
    assert memory.source == trace.source == "simulated"


def test_zero_costs_keep_the_order():
    memory = report(gl.gpipe(2, 3), costs=Costs(forward=0, backward=0))
    assert memory.peak_bytes(0) == 3 * SAVED
    assert memory.moments(0)[-1].total == 0


def test_lowering_changes_no_memory():
    schedule = gl.with_recompute(gl.one_f_one_b(3, 4), "always")
    for rank in range(3):
        assert report(schedule).peak(rank) == report(gl.lower(schedule)).peak(rank)


def test_one_size_per_stage():
    with pytest.raises(gl.InputError, match="one StageBytes per stage"):
        gl.simulate_memory(gl.simulate(gl.gpipe(2, 2)), [StageBytes(saved=1, boundary=1)])


def test_a_split_backward_keeps_gradients_from_its_input_half_to_its_weight_half():
    trace = gl.simulate(gl.zero_bubble_h1(2, 3))
    sizes = [gl.StageBytes(saved=100, boundary=10, deferred=40)] * 2
    report = gl.simulate_memory(trace, sizes)
    for rank in range(2):
        assert report.peak_bytes(rank, "deferred") >= 40
        assert report.moments(rank)[-1].total == 0
    whole = gl.simulate_memory(gl.simulate(gl.gpipe(2, 3)), sizes)
    assert whole.peak_bytes(0, "deferred") == 0

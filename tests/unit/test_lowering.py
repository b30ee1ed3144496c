import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import (
    COMPUTED,
    GRIDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    allowed,
    authored,
    can_run,
    crossing,
    graph,
    is_acyclic,
    loop,
    needed,
    random_schedule,
    v_shape,
)

import gpipe_lab as gl
from gpipe_lab import Costs, Op, Schedule
from gpipe_lab.plan.lowering import as_written, hangs
from gpipe_lab.plan.ops import SENDS, TRANSFERS
from gpipe_lab.view.waiting import plot_waiting

HOISTS = (0, 1, 2, 99)
MODES = [("never", False), ("always", False), ("always", True), ("except_last", False), ("every:2", False)]
PLACES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), loop(2), loop(3), v_shape(2), v_shape(3), (1, 0, 1)]
RECEIVES = {RECV_F, RECV_B}
SMALL = [(p, m) for p in range(1, 5) for m in range(1, 5)]


def with_mode(schedule: Schedule, mode: tuple[str, bool]) -> Schedule:
    return gl.with_recompute(schedule, *mode, layers_per_stage=3)


def consumers(schedule: Schedule, receive: Op) -> set[Op]:
    """The computations on the receiving rank that use the message."""
    source = Op(F, receive.stage - 1, receive.microbatch) if receive.kind is RECV_F else None
    used = set()
    for op in schedule.ops[schedule.stage_to_rank[receive.stage]]:
        if (op.stage, op.microbatch) != (receive.stage, receive.microbatch) or op.kind not in COMPUTED:
            continue
        sources = needed(op, schedule)
        brings = source in sources if source else any(s.stage == op.stage + 1 for s in sources)
        if brings:
            used.add(op)
    return used


def check_lowered(schedule: Schedule, hoist: int) -> Schedule:
    lowered = gl.lower(schedule, hoist=hoist)
    home = schedule.stage_to_rank
    assert lowered.stage_to_rank == home and lowered.num_microbatches == schedule.num_microbatches
    assert lowered.recompute_waits == schedule.recompute_waits and lowered.name == schedule.name
    # the computations and their order are as authored
    for before, after in zip(schedule.ops, lowered.ops, strict=True):
        assert tuple(op for op in after if op.kind in COMPUTED) == before
    # one send and one receive for every dependency that crosses ranks, on the right ranks
    flat = [(rank, op) for rank, row in enumerate(lowered.ops) for op in row if op.kind not in COMPUTED]
    pairs = crossing(schedule)
    expected = [(home[op.stage], op) for pair in pairs for op in pair]
    assert len(flat) == len(expected) and set(flat) == set(expected)
    # each send follows its source, each receive comes before its first use
    for row in lowered.ops:
        place = {op: index for index, op in enumerate(row)}
        for op in row:
            if op.kind is SEND_F:
                assert row[place[op] - 1].kind not in COMPUTED or row[place[op] - 1] == op._replace(kind=F)
                assert place[Op(F, op.stage, op.microbatch)] < place[op]
            elif op.kind is SEND_B:
                source = Op(I, op.stage, op.microbatch)
                source = source if source in place else Op(B, op.stage, op.microbatch)
                assert place[source] < place[op]
                assert not any(o.kind in COMPUTED for o in row[place[source] + 1 : place[op]])
            elif op.kind in RECEIVES:
                assert place[op] < min(place[use] for use in consumers(schedule, op))
    # all ranks' orders agree with one order of all transfers
    pair_of = {op: pair for pair in pairs for op in pair}
    before: dict = {}
    for row in lowered.ops:
        own = [pair_of[op] for op in row if op.kind not in COMPUTED]
        for node in own:
            before.setdefault(node, set())
        for first, second in itertools.pairwise(own):
            before[second].add(first)
    assert is_acyclic(before)
    return lowered


def check_hoist(schedule: Schedule, lowered: Schedule, hoist: int) -> None:
    for row in lowered.ops:
        for index, op in enumerate(row):
            if op.kind not in RECEIVES:
                continue
            uses = consumers(schedule, op)
            following, preceding = row[index + 1], row[index - 1] if index else None
            rest = row[index + 1 :]
            first_use = next(i for i, o in enumerate(rest) if o in uses)
            ahead = sum(o.kind in COMPUTED for o in rest[:first_use])
            if hoist == 0:  # as late as the order allows: a later transfer or its own use comes next
                assert following.kind not in COMPUTED or following in uses
            elif ahead > hoist:  # earlier than asked only because a later transfer must follow it
                assert following.kind not in COMPUTED
            elif ahead < hoist:  # later than asked only because an earlier transfer must precede it
                assert preceding is None or preceding.kind not in COMPUTED


@pytest.mark.parametrize("name", list(gl.SCHEDULES))
def test_every_small_schedule_is_complete_and_lowers_without_a_hang(name):
    """In every checkpoint mode; each mode meets one of the distances by which receives are hoisted."""
    for p, m in allowed(name, SMALL):
        for number, mode in enumerate(MODES):
            schedule = with_mode(gl.SCHEDULES[name](p, m), mode)
            assert can_run(schedule)
            hoist = HOISTS[(number + p + m) % len(HOISTS)]
            lowered = check_lowered(schedule, hoist)
            check_hoist(schedule, lowered, hoist)
            assert can_run(lowered)
            gl.validate(lowered)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from(list(gl.SCHEDULES)),
    st.integers(1, 10),
    st.integers(1, 20),
    st.sampled_from(MODES),
    st.sampled_from(HOISTS),
)
def test_larger_schedules_lower_without_a_hang(name, p, m, mode, hoist):
    m = m if name != "interleaved" else p * (1 + m % 3)
    schedule = with_mode(gl.SCHEDULES[name](p, m), mode)
    gl.validate(gl.lower(schedule, hoist=hoist))
    assert is_acyclic(graph(gl.lower(schedule, hoist=hoist)))


def test_a_v_placement_keeps_its_turn_on_one_rank():
    schedule = authored("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", place=(0, 1, 1, 0))
    lowered = check_lowered(schedule, 0)
    assert str(lowered.ops[1][0]) == "1RECV_F0"
    assert not any(op.kind is SEND_F and op.stage == 1 for op in lowered.ops[1])
    assert can_run(lowered)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    st.integers(0, 10**6),
    st.sampled_from(PLACES),
    st.integers(1, 4),
    st.sampled_from(["F", "B", "IW", "RB", "RB2"]),
    st.sampled_from(HOISTS),
)
def test_random_schedules_lower_without_a_hang(seed, place, m, kind, hoist):
    schedule = random_schedule(random.Random(seed), place, m, kind)
    lowered = check_lowered(schedule, hoist)
    check_hoist(schedule, lowered, hoist)
    assert can_run(lowered)
    ratio = gl.simulate(lowered).makespan_ms / gl.simulate(schedule).makespan_ms
    assert 1 - 1e-12 <= ratio < 1.2


@pytest.mark.parametrize("name", ["naive", "forward_only", "gpipe", "one_f_one_b"])
def test_one_order_costs_schedules_of_whole_backwards_nothing(name):
    for p, m in [*GRIDS[::3], (8, 8), (12, 20)]:
        for mode in MODES if p * m <= 30 else MODES[:1]:
            schedule = with_mode(gl.SCHEDULES[name](p, m), mode)
            for costs in (Costs(), Costs(backward=1), Costs(forward=1, backward=5)):
                authored_ms = gl.simulate(schedule, costs).makespan_ms
                for hoist in (0, 2):
                    lowered_ms = gl.simulate(gl.lower(schedule, hoist=hoist), costs).makespan_ms
                    assert lowered_ms == pytest.approx(authored_ms, rel=1e-12)


UNEVEN = [
    Costs(),
    Costs(backward=1),
    Costs(backward=5),
    Costs(forward=2),
    Costs(backward=2.5, backward_input=2, backward_weight=0.5),
    Costs(send=0.3),
]


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v"])
def test_one_order_costs_little_and_with_true_costs_almost_nothing(name):
    most = most_with_costs = 1.0
    for p, m in allowed(name, [(2, 2), (3, 5), (3, 6), (4, 8), (4, 16), (6, 6), (8, 16)]):
        schedule = gl.SCHEDULES[name](p, m)
        for costs in UNEVEN:
            authored_ms = gl.simulate(schedule, costs).makespan_ms
            ratio = gl.simulate(gl.lower(schedule), costs).makespan_ms / authored_ms
            with_costs = gl.simulate(gl.lower(schedule, costs=costs), costs).makespan_ms / authored_ms
            most, most_with_costs = max(most, ratio), max(most_with_costs, with_costs)
    assert most < 1.09  # an order for F = I = W, run with others
    assert most_with_costs < (1.04 if name == "zero_bubble_v" else 1 + 1e-9)


def test_any_costs_give_an_order_that_cannot_hang():
    rng = random.Random(3)
    for name in gl.SCHEDULES:
        for p, m in allowed(name, [(2, 4), (3, 3), (4, 4)]):
            schedule = gl.SCHEDULES[name](p, m)
            for _ in range(3):
                times = [[rng.choice((0, 0.1, 1, 7)) for _ in range(schedule.num_stages)] for _ in range(4)]
                costs = Costs(
                    forward=times[0], backward_input=times[1], backward_weight=times[2], send=times[3]
                )
                for hoist in HOISTS:
                    gl.validate(gl.lower(schedule, hoist=hoist, costs=costs))


def test_gpipe_of_two_by_two_to_the_letter():
    rows = [" ".join(op.short for op in row) for row in gl.lower(gl.gpipe(2, 2), hoist=0).ops]
    assert rows == [
        "F0 SEND_F0 F1 SEND_F1 RECV_B1 B1 RECV_B0 B0",
        "RECV_F0 F0 RECV_F1 F1 B1 SEND_B1 B0 SEND_B0",
    ]
    hoisted = [" ".join(op.short for op in row) for row in gl.lower(gl.gpipe(2, 2), hoist=99).ops]
    assert hoisted == [
        "F0 SEND_F0 F1 SEND_F1 RECV_B1 RECV_B0 B1 B0",
        "RECV_F0 RECV_F1 F0 F1 B1 SEND_B1 B0 SEND_B0",
    ]


def test_lowering_twice_is_refused():
    with pytest.raises(gl.InputError, match="added by lowering, once"):
        gl.lower(gl.lower(gl.gpipe(2, 2)))


@pytest.mark.parametrize("hoist", [-1, 0.5, True, None, "2", float("inf")])
def test_hoist_is_a_whole_number(hoist):
    with pytest.raises(gl.InputError, match="hoist"):
        gl.lower(gl.gpipe(2, 2), hoist=hoist)


def test_a_single_rank_has_no_transfers():
    assert gl.lower(gl.gpipe(1, 4)) == gl.gpipe(1, 4)


def test_lowering_is_pure():
    schedule = gl.one_f_one_b(3, 4)
    assert gl.lower(schedule) == gl.lower(schedule)
    assert schedule == gl.one_f_one_b(3, 4)


def test_the_authored_and_the_lowered_grid_are_the_same():
    for p, m in GRIDS[::5]:
        for constructor in (gl.gpipe, gl.one_f_one_b):
            assert str(gl.lower(constructor(p, m))) == str(constructor(p, m))


def test_thousands_of_transfers_that_wait_for_one_do_not_overflow_the_stack():
    n = 2000
    first = [op for m in range(n) for op in (Op(F, 0, m), Op(SEND_F, 0, m))]
    middle = [Op(RECV_F, 1, 0), Op(F, 1, 0), Op(SEND_F, 1, 0), *(Op(RECV_F, 1, m) for m in range(1, n))]
    middle += [op for m in range(1, n) for op in (Op(F, 1, m), Op(SEND_F, 1, m))]
    last = [op for m in range(n) for op in (Op(RECV_F, 2, m), Op(F, 2, m))]
    schedule = Schedule("long", n, (0, 1, 2), (tuple(first), tuple(middle), tuple(last)))
    assert gl.simulate(schedule, Costs(forward=1)).makespan_ms == 2 * n - 1


# Transfers in the order in which one first writes them down

MAKERS = (gl.naive, gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1, gl.zero_bubble_v, gl.forward_only)
schedules = st.builds(
    lambda make, p, m: make(p, m), st.sampled_from(MAKERS), st.integers(1, 5), st.integers(1, 8)
)


@settings(deadline=None, derandomize=True)
@given(schedules)
def test_the_same_transfers_as_lowering_beside_what_they_serve(schedule):
    written = as_written(schedule)
    assert written.rank_of == gl.lower(schedule).rank_of
    assert tuple(tuple(op for op in row if op.kind not in TRANSFERS) for row in written.ops) == schedule.ops
    for row in written.ops:
        for place, op in enumerate(row):
            if op.kind in SENDS:
                assert row[place - 1] in gl.dependencies(op, written)
            if op.kind in RECEIVES:
                assert op in gl.dependencies(row[place + 1], written)


@settings(deadline=None, derandomize=True)
@given(schedules)
def test_hangs_is_what_the_validator_refuses(schedule):
    written = as_written(schedule)
    if hangs(written):
        with pytest.raises(gl.ScheduleError, match="a circle"):
            gl.validate(written)
    else:
        gl.validate(written)
    assert not hangs(gl.lower(schedule))


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 8))
def test_gpipe_never_hangs_and_1f1b_does_from_two_on(p, m):
    assert not hangs(as_written(gl.gpipe(p, m)))
    assert not hangs(as_written(gl.naive(p, m)))
    assert hangs(as_written(gl.one_f_one_b(p, m))) == (p >= 2 and m >= 2)


def test_the_picture_names_the_circle():
    picture = plot_waiting(as_written(gl.one_f_one_b(2, 2)))
    assert "6 of 16 operations run" in picture.alt
    assert "rank 0 stands at 0SEND_F1 and waits for 1SEND_B0 of rank 1" in picture.alt
    assert picture.png()[:4] == b"\x89PNG"
    assert "Every rank ends" in plot_waiting(gl.lower(gl.one_f_one_b(3, 8))).alt

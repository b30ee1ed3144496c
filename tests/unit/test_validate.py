import pickle
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import (
    GRIDS,
    RECV_B,
    RECV_F,
    SEND_F,
    B,
    F,
    I,
    R,
    W,
    allowed,
    authored,
    can_run,
    crossing,
    graph,
    is_complete,
    loop,
    random_schedule,
    v_shape,
)

import gpipe_lab as gl
from gpipe_lab import Op, Schedule, ScheduleError

MODES = ["never", "always", "except_last", "every:2"]


def refused(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        gl.validate(schedule)
    for consumer in (gl.simulate, gl.lower):
        with pytest.raises(ScheduleError, match=re.escape(caught.value.rule)):
            consumer(schedule)
    error = caught.value
    assert error.rule and error.got and error.where and error.remedy
    text = str(error)
    assert all(part in text for part in (error.rule, error.got, error.where, error.remedy, error.grid))
    return error


def marked(error: ScheduleError) -> list[str]:
    return re.findall(r">>(\S+?)<<", error.grid)


def test_a_missing_operation():
    for p, m in GRIDS[5::7]:
        schedule = gl.gpipe(p, m)
        for rank, row in enumerate(schedule.ops):
            for index, op in enumerate(row):
                rows = list(schedule.ops)
                rows[rank] = row[:index] + row[index + 1 :]
                error = refused(replace(schedule, ops=tuple(rows)))
                assert error.got == f"no {op}"
                assert f"rank {rank}" in error.where
                assert error.remedy == f"add {op} to rank {rank}"


def test_a_duplicate():
    error = refused(authored("0F0 0B0 0F0", "1F0 1B0"))
    assert "each operation is there once" in error.rule
    assert error.got == "0F0 2 times"
    assert error.grid == "rank 0: >>F0<< B0 >>F0<<\nrank 1: F0 B0"


def test_a_backward_before_its_forward():
    error = refused(authored("0F0 0F1 0B1 0B0", "1F0 1B1 1F1 1B0"))
    assert "comes after what it needs" in error.rule
    assert error.got == "1B1 before 1F1"
    assert error.where.endswith("rank 1, position 1")
    assert error.grid == "rank 0: F0 F1 B1 B0\nrank 1: F0 >>B1<< >>F1<< B0"


def test_an_operation_on_the_wrong_rank():
    error = refused(authored("0F0 1F0 0B0", "1B0"))
    assert "on the rank that holds its stage" in error.rule
    assert error.got == "1F0 on rank 0" and error.remedy == "move 1F0 to rank 1"
    assert error.grid == "rank 0: F0 >>F0<< B0\nrank 1: B0"


@pytest.mark.parametrize("op", [Op(F, 2, 0), Op(F, -1, 0), Op(B, 0, 7), Op(F, 0, -1), Op(R, 0, 0, -1)])
def test_an_operation_out_of_range(op):
    schedule = gl.gpipe(2, 2)
    error = refused(replace(schedule, ops=((*schedule.ops[0], op), schedule.ops[1])))
    assert "that exist" in error.rule
    assert str(op) in error.got and marked(error) == [op.short]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("0F0 0R0", "a recompute restores"),  # inference has nothing to restore
        ("0F0 0B0 0R0", "comes after what it needs"),
        ("0F0 0R0.1 0R0 0B0", "a recompute restores"),
        ("0F0 0R0.1 0B0.1 0B0", "a recompute restores"),
        ("0F0 0B0.1 0B0", "a recompute restores"),
        ("0F0 0R0.1 0I0 0W0", "a recompute restores"),
        ("0F0 0R0.2 0B0.2 0R0 0B0", "once backward"),  # segment 1 is missing
        ("0F0 0R0 0B0 0R0.1 0B0.1", "comes after what it needs"),  # the last segment runs first
        ("0F0 0F0.1 0B0", "segment by segment"),
        ("0F0 0I0 0I0.1 0W0", "segment by segment"),
        ("0F0 0B0 0I0 0W0", "not both"),
        ("0F0 0B0 0W0", "not both"),
        ("0F0 0B0.1 0I0 0W0", "not both"),
        ("0F0 0I0", "once backward"),
        ("0F0 0W0", "once backward"),
        ("0F0 0W0 0I0", "comes after what it needs"),
        ("0B0", "once forward"),
        ("", "once forward"),
    ],
)
def test_recomputes_segments_and_split_backwards(row, rule):
    error = refused(authored(row))
    assert rule in error.rule


@pytest.mark.parametrize(
    "row",
    [
        "0F0 0R0 0B0",
        "0F0 0I0 0W0",
        "0F0 0R0 0I0 0W0",
        "0F0 0R0.1 0B0.1 0R0 0B0",
        "0F0 0R0.1 0R0 0B0.1 0B0",
    ],
)
def test_recomputes_segments_and_split_backwards_that_are_right(row):
    gl.validate(authored(row))


def test_a_recompute_without_its_backward_is_marked():
    error = refused(authored("0F0 0F1 0B1 0R0 0R0.1 0B0"))
    assert error.got == "0R0.1 without its backward"
    assert marked(error) == ["R0.1"]


def test_some_backwards_missing_are_named_even_where_a_recompute_is_left():
    assert refused(authored("0F0 0R0 0F1 0B1")).got == "no 0B0"


def test_an_absurd_segment_is_refused_at_once():
    assert "no 0B0" in refused(authored(f"0F0 0B0.{10**12}")).got
    assert "no 0R0" in refused(authored(f"0F0 0R0.{10**12} 0B0")).got


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("s", 1, (), ()),
        Schedule("s", 0, (0,), ((),)),
        Schedule("s", -1, (0,), ((),)),
        Schedule("s", 1, (0, 2), ((Op(F, 0, 0),), (Op(F, 1, 0),))),
        Schedule("s", 1, (0, -1), ((Op(F, 0, 0),), (Op(F, 1, 0),))),
        Schedule("s", 1, (0, 0), ((Op(F, 0, 0), Op(F, 1, 0)), ())),
        Schedule("s", 1, (0, 1), ((Op(F, 0, 0),),)),
        Schedule("s", 1, (1,), ((), (Op(F, 0, 0),))),
    ],
    ids=["nothing", "no micro-batch", "negative", "gap", "negative rank", "idle rank", "no list", "not 0"],
)
def test_placements_that_are_none(schedule):
    assert refused(schedule).rule


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("s", 1.0, (0,), ((Op(F, 0, 0),),)),
        Schedule("s", True, (0,), ((Op(F, 0, 0),),)),
        Schedule("s", "1", (0,), ((Op(F, 0, 0),),)),
        Schedule("s", 1, (0.0,), ((Op(F, 0, 0),),)),
        Schedule("s", 1, (False,), ((Op(F, 0, 0),),)),
        Schedule("s", 1, (0,), (("0F0",),)),
        Schedule("s", 1, (0,), ((None,),)),
        Schedule("s", 1, (0,), (((F, 0, 0),),)),
        Schedule("s", 1, (0,), ((Op("F", 0, 0),),)),
        Schedule("s", 1, (0,), ((Op(F, 0.5, 0),),)),
        Schedule("s", 1, (0,), ((Op(F, 0, 0.0),),)),
        Schedule("s", 1, (0,), ((Op(F, "0", 0),),)),
        Schedule("s", 1, (0,), ((Op(F, False, 0),),)),
        Schedule("s", 1, (0,), ((Op(F, 0, 0, None),),)),
        Schedule("s", 1, (0,), ((Op(F, np.int64(0), 0),),)),
        "gpipe",
        None,
        gl.gpipe,
    ],
    ids=lambda s: getattr(s, "__name__", repr(s)[:60]),
)
def test_things_of_the_wrong_type(schedule):
    for consumer in (gl.validate, gl.simulate, gl.lower):
        with pytest.raises(ScheduleError) as caught:
            consumer(schedule)
        assert caught.value.rule and caught.value.got and caught.value.remedy


def cycle_of(error: ScheduleError, schedule: Schedule) -> list[Op]:
    """The circle that the message names, checked link by link against the brute-force graph."""
    link = r"rank (\d+) stands at (\S+) and waits until rank (\d+) gets past ([^\s;]+)"
    waits = re.findall(link, error.got)
    assert waits
    home = schedule.stage_to_rank
    for (rank, op, next_rank, next_op), following in zip(waits, waits[1:] + waits[:1], strict=True):
        assert (next_rank, next_op) == following[:2]
        assert home[Op.parse(op).stage] == int(rank)
    cycle = [Op.parse(op) for _, op, _, _ in waits]
    assert len(set(cycle)) == len(cycle)
    before = graph(schedule)
    pair_of = {op: pair for pair in crossing(schedule) for op in pair}
    nodes = [pair_of.get(op, op) for op in cycle]
    for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        reached, stack = set(), [node]
        while stack:
            for source in before[stack.pop()] - reached:
                reached.add(source)
                stack.append(source)
        assert following in reached
    assert Counter(marked(error)) == Counter(schedule.label(op) for op in cycle)
    return cycle


def test_an_authored_order_that_hangs():
    # rank 0 wants micro-batch 1's gradient first, rank 1 offers micro-batch 0's before it has 1's input
    schedule = authored("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    error = refused(schedule)
    assert "no rank may wait for one that waits for it" in error.rule
    assert set(cycle_of(error, schedule)) == {Op(B, 0, 0), Op(F, 1, 1)}
    assert error.grid == "rank 0: F0 >>B0<< F1 B1\nrank 1: F0 >>F1<< B0 B1"


def test_two_ranks_that_both_receive_first():
    schedule = authored(
        "0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0F1 0SEND_F1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    error = refused(schedule)
    assert {Op(RECV_B, 0, 1), Op(RECV_F, 1, 1)} <= set(cycle_of(error, schedule))


def test_sends_in_another_order_than_the_receives():
    schedule = authored(
        "0F0 0F1 0SEND_F1 0SEND_F0",
        "1RECV_F0 1F0 1RECV_F1 1F1",
    )
    error = refused(schedule)
    cycle = cycle_of(error, schedule)
    assert Op(SEND_F, 0, 1) in cycle and Op(RECV_F, 1, 0) in cycle


def test_a_circle_of_three_ranks():
    place = (0, 1, 2, 0, 1, 2)
    rows = (
        "3F0 0F0 0F1 3F1",
        "1F0 1F1 4F0 4F1",
        "2F0 2F1 5F0 5F1",
    )
    error = refused(authored(*rows, place=place))
    assert "0F0" in " ".join(marked(error)) or "3F0" in marked(error)


def test_posting_receives_in_the_order_of_the_sends_repairs_it():
    gl.validate(authored("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F1 1RECV_F0 1F0 1F1"))


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"),  # the gradient is not sent
        ("0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1F1"),  # nor is the second micro-batch
        ("0F0 0SEND_F0", "1F0"),  # a send without its receive
        ("0F0", "1RECV_F0 1F0"),
        ("0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0 1SEND_B0"),  # no gradient in inference
        ("0F0 0SEND_F0 0SEND_F0.1", "1RECV_F0 1F0 1RECV_F0.1"),
        ("0RECV_F0 0F0 0SEND_F0", "1RECV_F0 1F0"),
        ("0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0"),
    ],
)
def test_transfers_that_are_missing_or_too_many(rows):
    assert refused_lowered(authored(*rows)).rule.startswith(("every send has", "a transfer takes"))


def refused_lowered(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        gl.validate(schedule)
    return caught.value


def test_a_transfer_within_a_rank_is_refused():
    error = refused_lowered(authored("0F0 0SEND_F0 1RECV_F0 1F0", place=(0, 0)))
    assert error.rule.startswith("a transfer takes a result to another rank")


@pytest.mark.parametrize(
    "rows", [("0SEND_F0 0F0", "1RECV_F0 1F0"), ("0F0 0SEND_F0", "1F0 1RECV_F0")], ids=["send", "receive"]
)
def test_a_transfer_on_the_wrong_side_of_its_computation(rows):
    assert "comes after what it needs" in refused_lowered(authored(*rows)).rule


def test_the_error_travels_between_processes():
    error = refused(authored("0F0 0B0 0F0"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ScheduleError and str(again) == str(error) and again.grid == error.grid
    assert isinstance(error, ValueError)


def mutate(rng: random.Random, schedule: Schedule) -> Schedule:
    rows = [list(row) for row in schedule.ops]
    row = rng.choice([row for row in rows if row] or [[Op(F, 0, 0)]])
    index = rng.randrange(len(row))
    op = row[index]
    ways = ["near", "swap", "move", "elsewhere", "drop", "double", "batch", "stage", "kind", "segment"]
    match rng.choice(ways):
        case "near":
            other = min(index + 1, len(row) - 1)
            row[index], row[other] = row[other], row[index]
        case "swap":
            other = rng.randrange(len(row))
            row[index], row[other] = row[other], row[index]
        case "move":
            row.insert(rng.randrange(len(row)), row.pop(index))
        case "elsewhere":
            target = rng.choice(rows)
            target.insert(rng.randint(0, len(target)), row.pop(index))
        case "drop":
            row.pop(index)
        case "double":
            row.insert(rng.randint(0, len(row)), op)
        case "batch":
            row[index] = op._replace(microbatch=op.microbatch + rng.choice([-1, 1]))
        case "stage":
            row[index] = op._replace(stage=op.stage + rng.choice([-1, 1]))
        case "kind":
            row[index] = op._replace(kind=rng.choice([F, B, I, W, R, SEND_F, RECV_F, RECV_B]))
        case "segment":
            row[index] = op._replace(segment=op.segment + rng.choice([-1, 1]))
    return replace(schedule, ops=tuple(map(tuple, rows)))


def same_verdict(schedule: Schedule) -> str:
    """Whether validator and brute force agree; a valid schedule is then simulated and printed to its end."""
    expected = can_run(schedule)
    try:
        gl.validate(schedule)
    except ScheduleError as error:
        assert not expected, f"refused although it runs:\n{error}"
        if error.rule.startswith("no rank may wait"):
            assert is_complete(schedule)
            cycle_of(error, schedule)
            return "hangs"
        str(schedule)
        return "refused"
    assert expected, f"accepted although it cannot run:\n{schedule.ops}"
    placed = {e.op for e in gl.simulate(schedule).events}
    assert placed >= {op for row in schedule.ops for op in row}
    return "runs"


PLACES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), loop(2), v_shape(2), v_shape(3), (0, 0, 1), (1, 0)]


SMALL = [(p, m) for p in range(1, 5) for m in range(1, 5)]


def some_schedule(rng: random.Random) -> Schedule:
    if rng.random() < 0.5:
        kind = rng.choice(["F", "B", "IW", "RB", "RB2"])
        return random_schedule(rng, rng.choice(PLACES), rng.randint(1, 3), kind)
    name = rng.choice(list(gl.SCHEDULES))
    mode = rng.choice(MODES)
    schedule = gl.SCHEDULES[name](*rng.choice(allowed(name, SMALL)))
    return gl.with_recompute(schedule, mode, rng.random() < 0.5, layers_per_stage=3)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.integers(0, 10**9))
def test_mutated_schedules_run_or_are_refused(seed):
    rng = random.Random(seed)
    schedule = some_schedule(rng)
    assert same_verdict(schedule) == "runs"
    for _ in range(4):
        schedule = mutate(rng, schedule)
        same_verdict(schedule)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.integers(0, 10**9))
def test_mutated_lowered_schedules_run_or_are_refused(seed):
    rng = random.Random(seed)
    schedule = gl.lower(some_schedule(rng), hoist=rng.choice([0, 1, 2, 99]))
    assert same_verdict(schedule) == "runs"
    for _ in range(3):
        schedule = mutate(rng, schedule)
        same_verdict(schedule)


def test_shuffled_orders_meet_every_verdict():
    rng = random.Random(0)
    seen = Counter()
    for _ in range(600):
        schedule = some_schedule(rng)
        if rng.random() < 0.5:
            schedule = gl.lower(schedule)
        for _ in range(rng.randint(1, 3)):
            rows = [list(row) for row in schedule.ops]
            row = rng.choice(rows)
            a, b = rng.randrange(len(row)), rng.randrange(len(row))
            row[a], row[b] = row[b], row[a]
            schedule = replace(schedule, ops=tuple(map(tuple, rows)))
        seen[same_verdict(schedule)] += 1
    assert min(seen["runs"], seen["refused"], seen["hangs"]) >= 10, seen


def test_natural_order_of_transfers_hangs_one_f_one_b():
    """Each receive right before its use and each send right after its source: not enough for rendezvous."""
    schedule = gl.one_f_one_b(3, 4)
    pair_of = {op: pair for pair in crossing(schedule) for op in pair}
    rows = []
    for row in schedule.ops:
        natural = []
        for op in row:
            forward = op.kind is F
            received = Op(RECV_F if forward else RECV_B, op.stage, op.microbatch)
            sent = Op(SEND_F if forward else gl.Kind.SEND_B, op.stage, op.microbatch)
            natural += [o for o in (received, op, sent) if o is op or o in pair_of]
        rows.append(tuple(natural))
    assert same_verdict(replace(schedule, ops=tuple(rows))) == "hangs"
    assert same_verdict(gl.lower(schedule, hoist=0)) == "runs"


def with_steps(schedule: Schedule) -> Schedule:
    """The schedule with a REDUCE and a STEP of every stage at the end of its rank."""
    rows = [list(row) for row in schedule.ops]
    per_replica = schedule.microbatches_per_replica
    for kind in (gl.Kind.REDUCE, gl.Kind.STEP):
        for stage in range(schedule.num_stages):
            for first in range(0, schedule.num_microbatches, per_replica):
                rows[schedule.home(stage, first)].append(Op(kind, stage, first))
    return replace(schedule, ops=tuple(map(tuple, rows)))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(0, 10**9))
def test_sums_and_steps_come_after_every_backward_of_their_stage(seed):
    rng = random.Random(seed)
    schedule = some_schedule(rng)
    if not schedule.trains:
        with pytest.raises(gl.ScheduleError, match="without backwards"):
            gl.validate(with_steps(schedule))
        return
    if rng.random() < 0.5:
        schedule = gl.lower(schedule)
    if rng.random() < 0.3 and not any(op.kind in gl.plan.ops.TRANSFERS for op in schedule.rank_of):
        schedule = gl.replicate(schedule, 2)
    whole = with_steps(schedule)
    gl.validate(whole)
    assert gl.simulate(whole).makespan_ms == gl.simulate(schedule).makespan_ms
    rank = rng.randrange(whole.num_ranks)
    row = list(whole.ops[rank])
    moved = rng.choice([op for op in row if op.kind in (gl.Kind.REDUCE, gl.Kind.STEP)])
    own = [i for i, op in enumerate(row) if op.kind in (B, W) and op.stage == moved.stage and op.segment == 0]
    row.remove(moved)
    row.insert(rng.randrange(max(own) + 1), moved)
    with pytest.raises(gl.ScheduleError, match="comes after what it needs"):
        gl.validate(replace(whole, ops=(*whole.ops[:rank], tuple(row), *whole.ops[rank + 1 :])))


def test_a_step_comes_after_its_sum_and_once():
    whole = with_steps(gl.gpipe(2, 3))
    swapped = replace(whole, ops=tuple((*row[:-2], row[-1], row[-2]) for row in whole.ops))
    with pytest.raises(gl.ScheduleError, match="comes after what it needs"):
        gl.validate(swapped)
    twice = replace(whole, ops=tuple((*row, row[-1]._replace(microbatch=1)) for row in whole.ops))
    with pytest.raises(gl.ScheduleError, match="steps once") as caught:
        gl.validate(twice)
    assert caught.value.remedy == "0STEP0"

"""The search: never invalid, never over its limits, never worse than the best built-in that fits."""

import random
import time

import pytest
from plan_oracle import can_run, interleaved, is_complete, loop, v_shape

import gpipe_lab as gl
from gpipe_lab import Costs, StageBytes
from gpipe_lab.planner.search import RULES, Limit, Problem, by_rule, improve, length, schedule_of

QUICK = 60_000


def built_in(place, m):
    """The built-in schedules of a placement, listed a second time."""
    p = 1 + max(place)
    found = []
    if place == tuple(range(p)):
        found += [gl.naive(p, m), gl.gpipe(p, m), gl.gpipe(p, m, backward="fifo"), gl.one_f_one_b(p, m)]
        found += [gl.zero_bubble_h1(p, m), gl.zero_bubble_h2(p, m)]
    if place == tuple(range(p)) * (len(place) // p) and m % p == 0:
        found.append(gl.interleaved(p, m, len(place) // p))
    if place == v_shape(p):
        found.append(gl.zero_bubble_v(p, m))
    return found


def is_split(schedule):
    return any(op.kind is gl.Kind.W for op in schedule.rank_of)


def some_costs(rng, num_stages):
    def each(low, high):
        return [round(rng.uniform(low, high), 2) for _ in range(num_stages)]

    inputs, weights = each(0.5, 2), each(0.3, 2)
    whole = [i + w for i, w in zip(inputs, weights, strict=True)]
    return Costs(
        forward=each(0.5, 2),
        backward=whole,
        backward_input=inputs,
        backward_weight=weights,
        send=rng.choice((0.0, 0.1, 0.5)),
    )


PLACES = [
    (0,),
    (0, 1),
    (0, 1, 2),
    (0, 1, 2, 3),
    loop(2),
    loop(3),
    v_shape(2),
    v_shape(3),
    (0, 0, 1),
    (1, 0, 1),
]


def test_valid_within_the_limit_and_never_worse():
    rng = random.Random(7)
    better = 0
    for _ in range(60):
        place = rng.choice(PLACES)
        p, m = 1 + max(place), rng.randint(1, 7)
        least = max(place.count(rank) for rank in range(p))
        limit = rng.choice((None, least, least + 1, 2 * least, 3 * least))
        costs, split = some_costs(rng, len(place)), rng.random() < 0.8
        options = dict(stage_to_rank=place, max_in_flight=limit, split=split, effort=QUICK)
        found = gl.search(len(place), m, costs, **options)
        assert is_complete(found) and can_run(found) and can_run(gl.lower(found))
        assert found.stage_to_rank == place and found.num_microbatches == m
        assert limit is None or max(gl.peak_in_flight(found)) <= limit
        assert split or not is_split(found)
        fitting = [
            gl.simulate(schedule, costs).makespan_ms
            for schedule in built_in(place, m)
            if (split or not is_split(schedule))
            and (limit is None or max(gl.peak_in_flight(schedule)) <= limit)
        ]
        makespan = gl.simulate(found, costs).makespan_ms
        assert makespan <= min(fitting, default=makespan) + 1e-9
        better += makespan < min(fitting, default=makespan) - 1e-9
    assert better >= 15


def test_equal_stages_give_the_best_built_in_by_name():
    equal = Costs(forward=1, backward=2)
    assert gl.search(4, 8, equal, max_in_flight=4, effort=QUICK).name == "zero_bubble_h1"
    assert gl.search(4, 8, equal, split=False, effort=QUICK) == gl.one_f_one_b(4, 8)
    alone = gl.search(4, 8, equal, max_in_flight=1, effort=QUICK)
    assert gl.simulate(alone, equal).makespan_ms == 8 * (4 * 1 + 4 * 1 + 1)  # the other W's hide behind I's
    v = gl.search(
        8, 8, Costs(forward=0.5, backward=1), stage_to_rank=v_shape(4), max_in_flight=8, effort=QUICK
    )
    assert v == gl.zero_bubble_v(4, 8)
    assert gl.simulate(v, Costs(forward=0.5, backward=1)).makespan_ms == 3 * 8 + 3 * 0.5


def test_zero_bubble_settings():
    """Between ZB-H1's memory and ZB-H2's, each micro-batch more in flight saves one W, down to no bubble."""
    p, m = 4, 8
    attention = Costs(forward=1, backward_input=1.3, backward_weight=0.7, backward=2)
    found = {most: gl.search(p, m, attention, max_in_flight=most) for most in (3, 4, 5, 6, 7)}
    makespans = {most: gl.simulate(schedule, attention).makespan_ms for most, schedule in found.items()}
    assert all(max(gl.peak_in_flight(schedule)) <= most for most, schedule in found.items())
    assert (found[4].name, found[7].name) == ("zero_bubble_h1", "zero_bubble_h2")
    least = m * 3 + (p - 1) * 1  # the last rank starts after three forwards and never pauses
    assert makespans[7] == pytest.approx(least)
    assert [makespans[most] for most in (4, 5, 6)] == pytest.approx([28.8, 28.1, 27.4])
    assert makespans[3] > makespans[4]  # less than 1F1B holds


def test_unequal_stages():
    """A slow second stage: it never pauses between its first forward and the end."""
    costs = Costs(forward=[1, 3, 1, 2], backward=[2, 6, 2, 4])
    found = gl.search(4, 8, costs)
    busiest = 8 * (3 + 6)
    assert gl.simulate(found, costs).makespan_ms == busiest + 1  # the first stage's forward, then it alone
    assert gl.simulate(gl.one_f_one_b(4, 8), costs).makespan_ms > busiest + 1
    whole = gl.search(4, 8, costs, split=False)
    assert gl.simulate(whole, costs).makespan_ms < gl.simulate(gl.one_f_one_b(4, 8), costs).makespan_ms


def test_measured_costs():
    trace = gl.simulate(
        gl.zero_bubble_h1(3, 6), Costs(forward=[1, 2, 1], backward_input=1, backward_weight=0.5)
    )
    found = gl.search(3, 6, gl.costs_of(trace), max_in_flight=3, effort=QUICK)
    assert gl.simulate(found, gl.costs_of(trace)).makespan_ms <= trace.makespan_ms


def test_bytes():
    weights = {"parameters": 100, "gradients": 100}
    sizes = [StageBytes(saved=saved, boundary=1, weights=weights) for saved in (40, 10, 10, 30)]
    makespans = []
    for limit in (240, 300, 400, 1000):
        found = gl.search(4, 8, memory_limit=limit, sizes=sizes, effort=QUICK)
        trace = gl.simulate(found)
        memory = gl.simulate_memory(trace, sizes, limit_bytes=limit)
        assert all(memory.peak_bytes(rank) <= limit for rank in range(4))
        makespans.append(trace.makespan_ms)
    assert makespans == sorted(makespans, reverse=True) and makespans[0] > makespans[-1]
    assert gl.search(4, 8, memory_limit="1KB", sizes=sizes, effort=QUICK) == found


def test_both_limits_at_once():
    sizes = [StageBytes(saved=10, boundary=1)] * 3
    found = gl.search(3, 6, memory_limit=30, sizes=sizes, max_in_flight=[3, 2, 1], effort=QUICK)
    assert all(peak <= most for peak, most in zip(gl.peak_in_flight(found), (3, 2, 1), strict=True))


def test_where_nothing_fits_it_says_so():
    with pytest.raises(gl.InputError, match="room for one micro-batch in all its stages") as caught:
        gl.search(4, 4, stage_to_rank=v_shape(2), max_in_flight=[2, 1])
    assert "rank 1" in caught.value.where and "takes 2 in flight" in caught.value.got and caught.value.remedy
    sizes = [StageBytes(saved=50, boundary=1, weights={"parameters": 60})] * 2
    with pytest.raises(gl.InputError, match="room for one micro-batch") as caught:
        gl.search(2, 4, memory_limit=100, sizes=sizes)
    assert caught.value.got == "room for 40 B, and one micro-batch takes 50 B"


def test_the_same_arguments_give_the_same_schedule():
    costs = some_costs(random.Random(3), 4)
    first = gl.search(4, 6, costs, max_in_flight=5, effort=200_000)
    assert all(gl.search(4, 6, costs, max_in_flight=5, effort=200_000) == first for _ in range(2))


@pytest.mark.alone
def test_effort_bounds_the_time():
    costs = some_costs(random.Random(4), 8)
    for m in (8, 64):
        start = time.process_time()
        gl.search(8, m, costs, effort=500_000)
        assert time.process_time() - start < 5
    none = gl.search(8, 8, costs, effort=0)  # the best built-in schedule
    assert none.name in gl.SCHEDULES


def test_effort_pays_where_memory_is_tight():
    costs = some_costs(random.Random(3), 4)
    found = [gl.search(4, 8, costs, max_in_flight=4, effort=effort) for effort in (0, 100_000, 2_000_000)]
    makespans = [gl.simulate(schedule, costs).makespan_ms for schedule in found]
    assert makespans == sorted(makespans, reverse=True) and makespans[2] < 0.98 * makespans[0]


def test_lowered_with_its_own_costs_a_found_schedule_keeps_its_makespan():
    for seed in range(6):
        costs = some_costs(random.Random(seed), 4)
        found = gl.search(4, 8, costs, max_in_flight=6, effort=QUICK)
        lowered = gl.simulate(gl.lower(found, costs=costs), costs).makespan_ms
        assert lowered <= 1.03 * gl.simulate(found, costs).makespan_ms


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (dict(max_in_flight=0), "max_in_flight is a whole number"),
        (dict(max_in_flight=[1, 2]), "or one per rank"),
        (dict(max_in_flight=True), "max_in_flight is a whole number"),
        (dict(memory_limit="1MiB"), "memory_limit comes with sizes"),
        (dict(sizes=[StageBytes(saved=1, boundary=1)] * 3), "memory_limit comes with sizes"),
        (dict(memory_limit=10, sizes=[StageBytes(saved=1, boundary=1)]), "one StageBytes per stage"),
        (dict(memory_limit="much", sizes=[StageBytes(saved=1, boundary=1)] * 3), "a size is a positive"),
        (dict(stage_to_rank=(0, 1)), "the rank of each stage"),
        (dict(stage_to_rank=(0, 2, 2)), "every rank from 0 on has a stage"),
        (dict(stage_to_rank=(0, 1, -1)), "the rank of each stage"),
        (dict(effort=-1), "effort is a whole number"),
        (dict(costs=Costs(forward=[1, 2])), "one entry per stage"),
    ],
)
def test_bad_input_is_refused(options, rule):
    with pytest.raises(gl.InputError, match=rule):
        gl.search(3, 2, **options)


def test_laying_out_agrees_with_the_simulator():
    rng = random.Random(11)
    for schedule in (gl.gpipe(3, 4), gl.zero_bubble_h2(3, 5), interleaved(2, 4, 2), gl.zero_bubble_v(3, 4)):
        costs = some_costs(rng, schedule.num_stages)
        problem = Problem(schedule, costs, ())
        makespan, _ = length(problem, problem.rows(schedule))
        assert makespan == pytest.approx(gl.simulate(schedule, costs).makespan_ms, rel=1e-12)
    first, *others = problem.rows(schedule)
    assert length(problem, [[*first[6:], *first[:6]], *others]) is None  # it waits for what waits for it


def test_every_rule_finishes_within_every_limit():
    rng = random.Random(12)
    for schedule in (gl.zero_bubble_h1(3, 4), gl.zero_bubble_v(3, 4), interleaved(2, 4, 2)):
        p, chunks = schedule.num_ranks, schedule.num_stages // schedule.num_ranks
        for most in (chunks, chunks + 1, 4):
            limit = Limit("in flight", (1.0,) * schedule.num_stages, (float(most),) * p)
            problem = Problem(schedule, some_costs(rng, schedule.num_stages), (limit,))
            for rule in RULES[::3]:
                made = schedule_of(problem, by_rule(problem, rule), "made")
                assert can_run(made) and max(gl.peak_in_flight(made)) <= most


def test_improvement_keeps_to_the_limit_and_never_worsens():
    schedule = gl.one_f_one_b(4, 6)
    problem = Problem(
        schedule, some_costs(random.Random(13), 4), (Limit("in flight", (1.0,) * 4, (4.0, 3.0, 2.0, 1.0)),)
    )
    before = length(problem, problem.rows(schedule))
    rows = improve(problem, problem.rows(schedule), 500)
    assert length(problem, rows) <= before
    improved = schedule_of(problem, rows, "improved")
    assert can_run(improved)
    assert all(peak <= most for peak, most in zip(gl.peak_in_flight(improved), (4, 3, 2, 1), strict=True))

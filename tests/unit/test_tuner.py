"""The tuner proposes what the simulator and the memory estimate rank first, and leaves nothing better out."""

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_lab as gl
from gpipe_lab.plan import formulas
from gpipe_lab.plan.errors import InputError
from gpipe_lab.planner.estimate import RECEIVES_AHEAD


@dataclass(frozen=True)
class Layer:
    parameter_bytes: int
    forward_ms: float
    backward_ms: float
    saved_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Layers:
    layers: tuple[Layer, ...]


def equal_layers(num_layers, m, *, launch_ms=2.0, sample_ms=1.0, weight=100, saved=10, output=3):
    """Layers that take launch + m · sample forward and twice that backward, and save in proportion to m."""
    ms = launch_ms + m * sample_ms
    return Layers((Layer(weight, ms, 2 * ms, m * saved, m * output),) * num_layers)


def profiles(num_layers=8, sizes=(1, 2, 4, 8), **how):
    return {m: equal_layers(num_layers, m, **how) for m in sizes}


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.sampled_from([1, 2, 4]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_equal_stages_agree_with_the_closed_forms(P, M, m):
    trace, memory = gl.lay_out(gl.gpipe(P, M), equal_layers(8, m))
    share = 8 // P
    assert trace.makespan_ms == pytest.approx(
        formulas.pipeline_ms(P, M, share * (2 + m), 2 * share * (2 + m))
    )
    messages = (RECEIVES_AHEAD + M) * m * 3 if P > 1 else 0
    # Before the first backward there are no gradients; after it there is a micro-batch less.
    within = max(
        100 * n - 10 * m * (n - 1) for n in range(1, share + 1)
    )  # its gradients come, activations go
    turning = share * M * m * 10 + within
    after = share * ((M - 1) * m * 10 + 100)
    assert memory.peak_bytes(0) == share * 100 + max(turning, after) + messages


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_a_checkpointed_stage_keeps_inputs_and_restores_one_microbatch(P, M):
    schedule = gl.with_recompute(gl.gpipe(P, M), "always")
    _, memory = gl.lay_out(schedule, equal_layers(8, 2), input_bytes=5)
    A, b = 8 // P * 20, 6
    if P > 1:
        assert memory.peak_bytes(P - 1, ("saved", "boundary", "recomputed")) == M * b + A - b
    assert memory.peak_bytes(0, ("saved", "boundary", "recomputed")) == M * 5 + A - 5


def test_the_best_is_the_best_of_all_that_fit():
    found = gl.tune(profiles(), 1500, num_stages=(1, 2, 4, 8), num_microbatches=(1, 2, 4, 8), max_batch=32)
    by_hand = {}
    for P, m, M, mode in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), ("never", "always")):
        if m * M > 32:
            continue
        trace, memory = gl.lay_out(gl.with_recompute(gl.gpipe(P, M), mode), equal_layers(8, m))
        if max(memory.peak_bytes(k) for k in range(P)) <= 1500:
            by_hand[P, m, M, mode] = trace.makespan_ms * P / (m * M)
    best = found.best
    assert len(found.ranked) == len(by_hand) < len(found.frame())
    assert best.ms_per_sample == min(by_hand.values())
    assert best.fits and best.setting.batch_size <= 32
    times = [plan.ms_per_sample for plan in found.ranked]
    assert times == sorted(times) == list(found.frame()["ms a sample and card"].dropna())
    assert best.setting.build().num_stages == best.setting.num_stages


def test_launches_ask_for_large_microbatches_and_the_bubble_for_many():
    generous = {"memory_limit": 10**9, "num_stages": (4,), "checkpoints": ("never",), "max_batch": 32}
    heavy = gl.tune(profiles(launch_ms=100.0), **generous).best
    light = gl.tune(profiles(launch_ms=0.0), **generous).best
    assert heavy.setting.microbatch_size > light.setting.microbatch_size == 1
    assert light.setting.num_microbatches > heavy.setting.num_microbatches


@pytest.mark.parametrize("name", [name for name in gl.SCHEDULES if name != "forward_only"])
def test_every_schedule_is_tuned(name):
    found = gl.tune(profiles(), 2000, num_stages=(1, 2, 4), num_microbatches=(4, 8), schedules=(name,))
    assert found.ranked and all(plan.fits for plan in found.ranked)
    assert all(out.peak_bytes is None or out.peak_bytes > 2000 for out in found.rejected)
    for plan in found.ranked:
        chosen = plan.setting
        schedule = gl.with_recompute(chosen.build(), chosen.checkpoint)
        trace, memory = gl.lay_out(schedule, equal_layers(8, chosen.microbatch_size))
        assert plan.trace.makespan_ms == trace.makespan_ms
        assert plan.peak_bytes == max(memory.peak_bytes(rank) for rank in memory.ranks)


def test_inference_is_laid_out_and_not_tuned():
    trace, memory = gl.lay_out(gl.forward_only(4, 3), equal_layers(8, 1))
    assert trace.makespan_ms == pytest.approx(6 * 2 * 3)
    assert memory.peak_bytes(0, ("gradients", "saved")) == 0
    with pytest.raises(InputError, match="a plan's schedule trains"):
        _ = gl.tune(profiles(), 1000, schedules=("forward_only",)).best


def test_nothing_fits_and_says_what_the_smallest_needs():
    found = gl.tune(profiles(), 50, num_stages=(1, 2))
    assert not found.ranked
    with pytest.raises(InputError, match="the least that fits is 819 B"):
        _ = found.best
    assert "none of" in str(found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_stages": ()},
        {"num_stages": (0,)},
        {"num_microbatches": (1.5,)},
        {"min_batch": 9, "max_batch": 8},
        {"max_batch": 0},
        {"num_stages": (9,)},
    ],
)
def test_a_grid_without_a_setting_is_refused(wrong):
    with pytest.raises(InputError):
        gl.tune(profiles(), 1000, **wrong)


def test_uneven_cuts_place_every_layer():
    trace, memory = gl.lay_out(gl.gpipe(3, 2), equal_layers(7, 1))
    assert [memory.peak_bytes(k, "parameters") for k in range(3)] == [300, 200, 200]
    assert [memory.peak_bytes(k, "gradients") for k in range(3)] == [300, 200, 200]
    assert trace.schedule.num_stages == 3


def test_the_batch_is_within_its_bounds():
    found = gl.tune(profiles(), 10**9, min_batch=8, max_batch=16)
    assert not found.rejected and {plan.setting.batch_size for plan in found.ranked} == {8, 16}

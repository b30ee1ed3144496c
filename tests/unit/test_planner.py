"""The planner: shapes against papers, bytes against the simulated memory, choices against brute force."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_lab as gl
from gpipe_lab.plan.data import read
from gpipe_lab.planner import traffic
from gpipe_lab.planner.choose import choose
from gpipe_lab.planner.estimate import Setting, plan_of
from gpipe_lab.planner.propose import layers_of

SMALL = gl.Model(name="small", layers=14, hidden=64, heads=4, ffn=256, vocab=500, sequence=32, dropout=True)
CARD = gl.Device(
    name="card", title="a card", memory_bytes=10**9, peak_tflops=1, node_gb_s=10, link_gb_s=1, per_node=4
)
FP32_PLAIN = gl.Precision(parameter_bytes=4, gradient_bytes=4, optimizer_bytes=0, value_bytes=4)


def test_shapes_have_the_published_number_of_parameters():
    for model in gl.MODELS.values():
        if model.published_parameters:
            assert model.parameters == pytest.approx(model.published_parameters, rel=0.04), model.name
        assert model.source
    assert gl.MODELS["llama3-405b"].parameters == pytest.approx(405.85e9, rel=1e-4)


def test_devices_name_their_source():
    assert set("a100-40 a100-80 h100 h200 v100 p40 p100 tpu-v2 tpu-v3".split()) <= set(gl.DEVICES)
    assert all(device.source for device in gl.DEVICES.values())
    assert gl.DEVICES["a100-80"].memory_bytes == 80 * 10**9
    assert gl.DEVICES["tpu-v3"].memory_bytes == 16 * 2**30


def test_activations_are_those_of_the_paper():
    """Korthikanti et al. 2022: s·b·h·(34 + 5·a·s/h) a layer; fused attention keeps no scores."""
    gpt3 = gl.MODELS["gpt3-175b"]
    for b in (1, 3):
        boundary = b * gpt3.sequence * gpt3.hidden
        scores = 5 * gpt3.heads * gpt3.sequence / gpt3.hidden
        assert gpt3.layer_saved_bytes(b, fused_attention=False) == boundary * (34 + scores)
        assert gpt3.layer_saved_bytes(b) == 34 * boundary
        assert gpt3.boundary_bytes(b) == 2 * boundary
    long = gl.MODELS["7b-32k"]
    assert long.layers * long.layer_saved_bytes(1) == pytest.approx(146e9, rel=0.001)
    assert long.layers * long.layer_saved_bytes(1, fused_attention=False) == pytest.approx(5.64e12, rel=0.001)


def test_a_step_takes_six_operations_a_parameter_and_token():
    gpt3 = gl.MODELS["gpt3-175b"]
    plan = gl.estimate(gpt3, "a100-80", num_stages=8, num_microbatches=8, tensor_parallel=8)
    tokens = 8 * gpt3.sequence
    assert plan.flops == pytest.approx(6 * gpt3.parameters * tokens, rel=0.03)  # 2.8 % for attention


def test_time_is_the_bubble_and_the_work():
    plan = gl.estimate(SMALL, CARD, num_stages=4, num_microbatches=8, schedule="gpipe", efficiency=1.0)
    work = plan.flops / (CARD.peak_tflops * 1e9)
    useful = plan.trace.useful_fraction
    assert plan.step_ms == pytest.approx(work / 4 / useful, rel=1e-9)
    assert plan.model_flops_utilisation == pytest.approx(useful, rel=1e-9)
    assert plan.bubble_fraction >= 3 / 11
    half = gl.estimate(SMALL, CARD, num_stages=4, num_microbatches=8, schedule="gpipe", efficiency=0.5)
    assert half.trace.busy_ms(0) == pytest.approx(2 * plan.trace.busy_ms(0))


def test_links_carry_what_the_formulas_say():
    plan = gl.estimate(SMALL, CARD, num_stages=4, num_microbatches=8, num_replicas=2, microbatch_size=3)
    assert plan.link_bytes["pipeline"] == 2 * 8 * SMALL.boundary_bytes(3)
    heaviest = max(plan.memory.peak_bytes(rank, "gradients") for rank in range(4))
    assert plan.link_bytes["data"] == heaviest  # 2(D-1)/D of it, D = 2
    assert plan.reduce_ms == pytest.approx(heaviest / 1e6)  # copies stand 4 apart in nodes of 4: one port
    assert plan.step_ms == plan.trace.makespan_ms + plan.reduce_ms
    assert plan.link_bytes["tensor"] == 0
    shared = gl.estimate(SMALL, CARD, num_stages=1, num_microbatches=2, tensor_parallel=4)
    assert shared.link_bytes == {"pipeline": 0, "data": 0, "tensor": 0} | {
        "tensor": SMALL.layers * 2 * 8 * 3 * SMALL.boundary_bytes(1) // 4  # two micro-batches, 3/4 each
    }


def test_sharding_the_optimizer_divides_it_among_the_copies():
    def held(**options):
        return gl.estimate(SMALL, CARD, num_stages=2, num_microbatches=4, num_replicas=4, **options)

    whole, shared = (plan.memory.moments(0)[0].bytes for plan in (held(), held(shard_optimizer=True)))
    assert shared["optimizer"] == pytest.approx(whole["optimizer"] / 4, abs=1)
    assert shared["parameters"] == whole["parameters"]


@pytest.mark.parametrize("device", ["h100", "a100-80"])
def test_a_ring_leaves_a_node_through_the_ports_of_its_ranks_there(device):
    card = gl.DEVICES[device]
    assert card.ring_gb_s(8) == card.ring_gb_s(2, stride=4) == card.node_gb_s
    for num_ranks, stride, ports in ((1024, 1, 8), (16, 1, 8), (8, 2, 4), (64, 4, 2), (2, 8, 1), (8, 128, 1)):
        assert card.ring_gb_s(num_ranks, stride) == ports * card.link_gb_s, (num_ranks, stride)
    assert card.send_gb_s(1024) == card.link_gb_s and card.send_gb_s(8) == card.node_gb_s
    slow_inside = replace(card, node_gb_s=card.link_gb_s)
    assert slow_inside.ring_gb_s(1024) == card.link_gb_s


def test_gradients_of_a_405b_on_1024_travel_through_eight_ports():
    """Fully sharded, 2.43 TB a rank through eight ports of 50 GB/s: about 6.1 s, not 48.6 s through one."""
    sent = traffic.fully_sharded_bytes(2 * 405e9, 1024)
    assert sent == pytest.approx(2.43e12, rel=0.01)
    assert sent / (1e9 * gl.DEVICES["h100"].ring_gb_s(1024)) == pytest.approx(6.1, rel=0.01)
    one = gl.estimate("llama2-7b", "h100", num_stages=1, num_replicas=64, num_microbatches=1)
    eight = gl.estimate("llama2-7b", "h100", num_stages=8, num_replicas=8, num_microbatches=1)
    assert one.reduce_ms == pytest.approx(one.link_bytes["data"] / (8 * 50e6), rel=1e-6)
    assert eight.reduce_ms == pytest.approx(eight.link_bytes["data"] / 50e6, rel=1e-6)


def test_the_busiest_link_carries_every_chunk():
    plan = gl.estimate(SMALL, CARD, num_stages=4, num_microbatches=8, schedule="interleaved", num_chunks=3)
    assert plan.link_bytes["pipeline"] == 3 * 2 * 8 * SMALL.boundary_bytes(1)
    turning = gl.estimate(SMALL, CARD, num_stages=2, num_microbatches=8, schedule="zero_bubble_v")
    assert turning.link_bytes["pipeline"] == 2 * 2 * 8 * SMALL.boundary_bytes(1)  # none at the turn


TRAINING = tuple(name for name in gl.SCHEDULES if name != "forward_only")


@pytest.mark.parametrize("name", TRAINING)
@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["never", "every:1", "every:2", "always", "except_last"]),
)
def test_every_schedule_is_estimated(name, p, rounds, mode):
    plan = gl.estimate(
        SMALL, CARD, num_stages=p, num_microbatches=p * rounds, schedule=name, checkpoint=mode, efficiency=1.0
    )
    schedule = plan.trace.schedule
    assert len(plan.spans) == schedule.num_stages == len(gl.SCHEDULES[name](p, p * rounds).stage_to_rank)
    assert [layer for span in plan.spans for layer in span] == list(range(SMALL.layers + 2))
    work_ms = plan.flops / (CARD.peak_tflops * 1e9)
    assert plan.trace.useful_fraction == pytest.approx(work_ms / (p * plan.trace.makespan_ms), rel=1e-9)
    held = gl.Precision().held_bytes * (SMALL.parameters)
    weights = ("parameters", "gradients", "optimizer")
    assert sum(plan.memory.peak_bytes(rank, weights) for rank in range(p)) == pytest.approx(held, abs=99)
    for rank, most in enumerate(gl.peak_in_flight(schedule)):
        saved = plan.memory.peak_bytes(rank, ("boundary", "recomputed", "saved"))
        largest = max(sum(LAYERS[i].saved_bytes for i in plan.spans[k]) for k in schedule.stages_of(rank))
        assert 0 < saved <= most * largest
    assert plan.peak_bytes <= sum(plan.memory.peak_bytes(rank) for rank in range(p))


LAYERS = layers_of(SMALL, CARD)


@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_is_proposed_only_where_it_fits(name):
    """A limit at which one schedule fits in some settings only; all that are ranked do, simulated whole."""
    for limit in (2_000_000, 3_000_000, 6_000_000):
        plans = gl.propose(SMALL, CARD, 4, batch_size=48, memory_limit=limit, schedules=(name,), most=1000)
        assert all(plan.fits and plan.peak_bytes <= limit for plan in plans.ranked)
        for plan in plans.ranked:
            chosen = plan.setting
            again = gl.estimate(
                SMALL, CARD, num_stages=chosen.num_stages, num_microbatches=chosen.num_microbatches,
                microbatch_size=chosen.microbatch_size, num_replicas=chosen.num_replicas,
                schedule=name, checkpoint=chosen.checkpoint, memory_limit=limit,
            )  # fmt: skip
            assert (again.peak_bytes, again.step_ms, again.fits) == (plan.peak_bytes, plan.step_ms, True)
        for out in plans.rejected:
            assert out.peak_bytes is None or out.peak_bytes > limit
    assert plans.ranked and plans.best.setting.schedule == name


def test_a_plan_that_does_not_fit_is_not_ranked():
    """ZB-H2 holds twice as many micro-batches as 1F1B: on eight of these devices it never fits."""
    how = {"batch_size": 128, "microbatch_sizes": (1, 2), "checkpoints": ("never", "always")}
    plans = gl.propose("llama3-8b", "h100", 8, schedules=("zero_bubble_h2",), **how)
    assert not plans.ranked
    with pytest.raises(gl.InputError, match="the least that fits is 115 GiB"):
        _ = plans.best
    both = gl.propose("llama3-8b", "h100", 8, schedules=("zero_bubble_h2", "one_f_one_b"), **how)
    assert {plan.setting.schedule for plan in both.ranked} == {"one_f_one_b"}
    assert all(plan.fits for plan in both.ranked)


@pytest.mark.parametrize("name", ["forward_only", "zigzag"])
def test_a_schedule_that_no_plan_has_is_refused_with_the_rule(name):
    with pytest.raises(gl.InputError, match="a plan's schedule trains: one of naive") as caught:
        gl.estimate(SMALL, CARD, num_stages=2, num_microbatches=2, schedule=name)
    assert caught.value.remedy
    with pytest.raises(gl.InputError, match="a plan's schedule trains"):
        _ = gl.propose(SMALL, CARD, 4, batch_size=16, schedules=(name,)).best


def test_the_fastest_are_found_without_simulating_all(monkeypatch):
    """Every setting is looked at with few micro-batches first; GPipe's then fit that do not in the end."""
    monkeypatch.setattr("gpipe_lab.planner.choose.FEW_OPERATIONS", 0)
    how = {
        "batch_size": 80,
        "memory_limit": 8_000_000,
        "microbatch_sizes": (1, 2),
        "schedules": TRAINING,
    }
    all_of_them = gl.propose(SMALL, CARD, 4, most=1000, **how)
    few = gl.propose(SMALL, CARD, 4, most=3, **how)
    assert few.num_slower > 0 == all_of_them.num_slower
    wanted = [plan.step_ms for plan in all_of_them.ranked[:3]]
    assert [plan.step_ms for plan in few.ranked] == pytest.approx(wanted, rel=1e-9)


def test_more_chunks_make_the_bubble_smaller():
    plans = gl.propose(
        SMALL, CARD, 4, batch_size=8, num_stages=(4,), microbatch_sizes=(1,), schedules=("interleaved",),
        num_chunks=(1, 2, 4), checkpoints=("never",), efficiency=1.0,
    )  # fmt: skip
    assert sorted(plan.setting.num_chunks for plan in plans.ranked) == [1, 2, 4]
    by_chunks = {plan.setting.num_chunks: plan.bubble_fraction for plan in plans.ranked}
    assert by_chunks[4] < by_chunks[1]


def test_checkpointing_layer_by_layer_keeps_every_input():
    layers = layers_of(SMALL, CARD)
    setting = Setting(num_stages=2, num_microbatches=3, schedule="gpipe", checkpoint="every:1")
    plan = plan_of(setting, layers)
    inputs = [sum(layers[i].input_bytes for i in span) for span in plan.spans]
    for rank in range(2):
        assert plan.memory.peak_bytes(rank, "boundary") == 3 * inputs[rank]
        largest = max(layers[i].saved_bytes - layers[i].input_bytes for i in plan.spans[rank])
        assert plan.memory.peak_bytes(rank, "recomputed") == largest


def test_the_search_finds_the_best_that_brute_force_finds():
    plans = gl.propose(SMALL, CARD, 4, batch_size=16, memory_limit=9_000_000, most=1000)
    assert plans.ranked and plans.rejected
    assert all(plan.fits and plan.setting.batch_size == 16 for plan in plans.ranked)
    assert all(plan.setting.num_devices == 4 for plan in plans.ranked)
    steps = [plan.step_ms for plan in plans.ranked]
    assert steps == sorted(steps)
    few = gl.propose(SMALL, CARD, 4, batch_size=16, memory_limit=9_000_000, most=6)
    assert few.best.step_ms <= 1.02 * plans.best.step_ms
    for out in plans.rejected:
        assert out.reason
        if out.peak_bytes is not None:
            assert out.peak_bytes > 9_000_000
    frame = plans.frame()
    assert len(frame) == len(plans.ranked) + len(plans.rejected)
    assert (frame["why not"] != "").sum() == len(plans.rejected)


def test_a_limit_that_nothing_fits_names_the_least_that_does():
    plans = gl.propose(SMALL, CARD, 4, batch_size=16, memory_limit=1000)
    with pytest.raises(gl.InputError, match="the least that fits") as caught:
        _ = plans.best
    least = plans.least.peak_bytes
    assert f"memory_limit={least}" in caught.value.remedy
    assert gl.propose(SMALL, CARD, 4, batch_size=16, memory_limit=least).best.fits


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"model": "gpt9"}, "a model is"),
        ({"device": "h900"}, "a device is"),
        ({"num_devices": 0}, "num_devices is"),
        ({"batch_size": -1}, "batch_size is"),
        ({"efficiency": 0}, "efficiency is"),
        ({"efficiency": 1.5}, "efficiency is"),
        ({"memory_limit": "lots"}, "a size is"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, rule):
    given = {"model": "llama3-8b", "device": "h100", "num_devices": 8, "batch_size": 8} | options
    with pytest.raises(gl.InputError, match=rule):
        gl.propose(given.pop("model"), given.pop("device"), given.pop("num_devices"), **given)


def test_a_model_that_has_no_shape_is_refused():
    with pytest.raises(gl.InputError, match="whole numbers"):
        replace(SMALL, hidden=0)
    with pytest.raises(gl.InputError, match="heads divide"):
        replace(SMALL, heads=5)
    with pytest.raises(gl.InputError, match="checkpoint is"):
        gl.estimate(SMALL, CARD, num_stages=1, num_microbatches=1, checkpoint="sometimes")


def test_settings_with_reasons():
    plans = gl.propose(
        "llama3-405b",
        "h100",
        64,
        batch_size=64,
        tensor_parallel=(1, 3, 8, 16),
        microbatch_sizes=(1, 4),
        most=1,
    )
    reasons = " ".join(out.reason for out in plans.rejected)
    for part in (
        "T divides 8 key heads",
        "divides the batch of 64",
        "num_microbatches is a multiple of num_ranks",
        "divides the 64 devices",
        "weights alone need",
    ):
        assert part in reasons, part


def test_big_models_on_many_devices_take_seconds():
    plans = gl.propose(
        "llama3-405b", "h100", 16384, batch_size=2048, tensor_parallel=(8,), microbatch_sizes=(1,),
        num_stages=(8, 16, 32), schedules=("one_f_one_b",), shard_optimizer=True, most=2,
    )  # fmt: skip
    best = plans.best
    assert best.fits and best.setting.num_devices == 16384
    assert 0.2 < best.model_flops_utilisation < 0.5  # an efficiency of 0.5, less bubble, messages and sums
    assert math.isclose(best.samples_per_s, 2048 / best.step_ms * 1000)


def test_measured_layers_are_planned_like_worked_out_ones():
    layers = layers_of(SMALL, CARD, precision=FP32_PLAIN)
    found = choose(
        [Setting(num_stages=p, num_microbatches=8, schedule="gpipe") for p in (1, 2, 4, 40)],
        lambda setting: layers,
        limit_bytes=10**12,
    )
    assert [out.reason for out in found.rejected] == [
        "every stage holds at least one layer: 16 layers for 40 stages"
    ]
    assert found.best.setting.num_stages == 4
    assert found.best.frame().shape[0] == 4
    first, fastest, *_, last = repr(found).splitlines()
    assert first == "3 settings that fit, the fastest first:" and fastest.startswith("P = 4, ")
    assert last.endswith(".frame()")


def test_facts_say_where_they_come_from():
    for name in ("models", "devices", "tables/zero_bubble", "tables/gpipe_table1", "tables/torchgpipe"):
        source, rows = read(name)
        assert len(source) > 20 and rows
    with pytest.raises(gl.InputError, match="data folder"):
        read("nothing")

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import GRIDS, RECV_B, RECV_F, SEND_B, SEND_F, B, F, R, authored, crossing

import gpipe_lab as gl
from gpipe_lab import Costs, Event, Op, Trace
from gpipe_lab.plan.trace import MEASURED, chrome_document, handovers, messages


def hand_made() -> Trace:
    """Two ranks, measured, the first computation 5 ms after the clock's zero."""
    events = (
        Event(0, "compute", Op(F, 0, 0), 5.0, 7.0),
        Event(0, "comm", Op(SEND_F, 0, 0), 7.0, 8.0),
        Event(1, "wait", Op(F, 1, 0), 0.0, 8.0),
        Event(1, "comm", Op(RECV_F, 1, 0), 7.5, 8.0),
        Event(1, "compute", Op(F, 1, 0), 8.0, 10.0),
        Event(1, "compute", Op(R, 1, 0), 10.0, 11.0),
        Event(1, "compute", Op(B, 1, 0), 11.0, 14.0),
        Event(1, "comm", Op(SEND_B, 1, 0), 14.0, 15.0),
        Event(0, "comm", Op(RECV_B, 0, 0), 2.0, 15.0),
        Event(0, "compute", Op(B, 0, 0), 15.0, 25.0),
    )
    return Trace(events, MEASURED)


def test_metrics_come_from_the_events():
    trace = hand_made()
    assert trace.num_ranks == 2
    assert trace.start_ms == 5 and trace.makespan_ms == 20
    assert trace.busy_ms(0) == 12 and trace.busy_ms(1) == 6
    assert trace.busy_fraction(0) == 12 / 20
    assert trace.bubble_fraction == pytest.approx(1 - 18 / 40)
    assert trace.useful_fraction == pytest.approx(17 / 40)


def test_bubble_and_shares_fit_together():
    for p, m in GRIDS:
        trace = gl.simulate(gl.with_recompute(gl.gpipe(p, m), "always"), Costs(send=0.5))
        busy = sum(trace.busy_fraction(rank) for rank in range(p)) / p
        assert trace.bubble_fraction == pytest.approx(1 - busy, abs=1e-12)
        recomputed = sum(e.duration_ms for e in trace.computations if e.op.kind is R)
        lost = recomputed / (trace.makespan_ms * p)
        assert trace.useful_fraction + lost == pytest.approx(busy, abs=1e-12)


def test_an_empty_trace_has_metrics():
    trace = Trace((), MEASURED)
    assert (trace.makespan_ms, trace.start_ms, trace.num_ranks) == (0, 0, 0)
    assert trace.useful_fraction == 0
    assert len(trace.frame()) == 0
    assert messages(trace) == ()


def test_messages_pair_each_send_with_its_receive():
    for schedule in (gl.gpipe(3, 4), gl.one_f_one_b(4, 3), gl.forward_only(3, 2)):
        for s in (schedule, gl.lower(schedule)):
            pairs = messages(gl.simulate(s, Costs(send=0.25)))
            assert {(a.op, b.op) for a, b in pairs} == set(crossing(schedule))
            assert all(send.start_ms + 0.25 <= receive.end_ms + 1e-12 for send, receive in pairs)
            assert [a.start_ms for a, _ in pairs] == sorted(a.start_ms for a, _ in pairs)


def test_simulated_and_lowered_events_are_the_same_computations():
    schedule = gl.one_f_one_b(3, 5)
    assert gl.simulate(schedule).computations == gl.simulate(gl.lower(schedule)).computations


def test_frame():
    trace = hand_made()
    frame = trace.frame()
    columns = "rank lane op kind stage microbatch segment start_ms end_ms duration_ms".split()
    assert list(frame.columns) == columns
    assert len(frame) == len(trace.events)
    row = frame.iloc[0]
    assert (row["op"], row["kind"], row["lane"], row["duration_ms"]) == ("0F0", "F", "compute", 2.0)
    busy = frame[frame.lane == "compute"].groupby("rank").duration_ms.sum()
    assert list(busy) == [12, 6]


@pytest.mark.parametrize(
    "trace",
    [
        hand_made(),
        gl.simulate(gl.gpipe(4, 4), Costs(send=0.5)),
        gl.simulate(gl.lower(gl.one_f_one_b(3, 4)), Costs(send=0.5)),
        gl.simulate(gl.with_recompute(gl.gpipe(2, 2), "every:1", layers_per_stage=2)),
        gl.simulate(authored("0F0 1F0 1B0 0B0", place=(0, 0))),
    ],
    ids=["measured", "gpipe", "lowered", "segments", "one rank"],
)
def test_chrome_export(trace, tmp_path):
    path = trace.to_chrome(tmp_path / "trace.json")
    assert path == tmp_path / "trace.json"
    content = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    events = content["traceEvents"]
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["source"] == trace.source
    assert content["otherData"]["makespan_ms"] == trace.makespan_ms

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(trace.num_ranks)}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}

    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(trace.events)
    first = min(event.start_ms for event in trace.events)
    for shown, event in zip(slices, trace.events, strict=True):
        assert shown["name"] == str(event.op) and shown["pid"] == event.rank
        assert threads[shown["pid"], shown["tid"]].split()[0] == event.lane
        assert shown["ts"] == pytest.approx((event.start_ms - first) * 1000)  # in microseconds
        assert shown["dur"] == pytest.approx(event.duration_ms * 1000, abs=1e-3) and shown["dur"] > 0
        assert shown["args"]["source"] == trace.source

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    assert len(starts) == len(messages(trace) or handovers(trace)) > 0 or trace.num_ranks == 1
    for number, start in starts.items():
        end = next(e for e in events if e["ph"] == "f" and e["id"] == number)
        (origin,), (target,) = bound(start, slices), bound(end, slices)
        if messages(trace):
            assert re.match(r"\d+SEND", origin["name"]) and re.match(r"\d+RECV", target["name"])
        assert origin["pid"] != target["pid"]
        assert origin["args"]["microbatch"] == target["args"]["microbatch"]


def bound(arrow, slices):
    """The innermost slice that an arrow's end belongs to: as Perfetto finds it, by thread and time."""
    around = [
        e
        for e in slices
        if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
        and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
    ]
    return around[-1:]


def trace_event_format(events):
    """Rules of the Chrome trace event format, as far as it is used here; yields what breaks one."""
    for e in events:
        if not {"ph", "pid", "tid", "name"} <= e.keys():
            yield f"without a mandatory field: {e}"
        if e["ph"] != "M" and not (isinstance(e["ts"], float | int) and e["ts"] >= 0):
            yield f"without a time: {e}"
        if e["ph"] == "X" and e["dur"] < 0:
            yield f"ends before it starts: {e}"
    by_thread = {}
    for e in events:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for thread, spans in by_thread.items():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            if start < end - 1e-6:
                yield f"slices of thread {thread} overlap at {start}"
    flows = {}
    for e in events:
        if e["ph"] in "stf":
            flows.setdefault((e["cat"], e["name"], e["id"]), []).append(e)
    for flow in flows.values():
        if [e["ph"] for e in flow] != ["s", "f"] or flow[0]["ts"] > flow[1]["ts"] or flow[1]["bp"] != "e":
            yield f"not an arrow: {flow}"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    if not by_thread.keys() <= named:
        yield f"threads without a name: {by_thread.keys() - named}"


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["naive", "gpipe", "one_f_one_b", "zero_bubble_h1"]),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    send=st.sampled_from([0.0, 0.25, 3.0]),
    lowered=st.booleans(),
)
def test_chrome_export_keeps_to_the_format(name, num_stages, num_microbatches, send, lowered):
    schedule = gl.SCHEDULES[name](num_stages, num_microbatches)
    trace = gl.simulate(gl.lower(schedule) if lowered else schedule, Costs(send=send))
    events = chrome_document(trace)["traceEvents"]
    assert list(trace_event_format(events)) == []
    slices = [e for e in events if e["ph"] == "X"]
    ends = [e for e in events if e["ph"] in "sf"]
    assert all(bound(end, slices) for end in ends)
    assert len(ends) == 2 * 2 * num_microbatches * (num_stages - 1)


def test_what_breaks_the_format_is_seen():
    slice_ = {"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 0, "dur": 2}
    later = slice_ | {"ts": 1, "dur": 3}
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {}}
    arrow = {"ph": "s", "name": "m", "cat": "m", "id": 1, "pid": 0, "tid": 0, "ts": 0}
    assert list(trace_event_format([name, slice_])) == []
    for broken in ([slice_], [name, slice_, later], [name, slice_, arrow], [name, slice_ | {"ts": -1}]):
        assert list(trace_event_format(broken))


def test_messages_that_overlap_get_threads_of_their_own():
    trace = hand_made()
    sends = [Event(0, "comm", Op(SEND_F, 0, m), 10.0 + m, 20.0 + m) for m in range(3)]
    crowded = replace(trace, events=(*trace.events, *sends), schedule=None)
    events = chrome_document(crowded)["traceEvents"]
    assert list(trace_event_format(events)) == []
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert {"comm", "comm 2", "comm 3"} <= names


def test_chrome_export_takes_a_string_path(tmp_path):
    assert gl.simulate(gl.gpipe(1, 1)).to_chrome(str(tmp_path / "t.json")).exists()


def test_notes_say_which_backwards_were_not_split():
    from dataclasses import replace

    trace = gl.simulate(gl.zero_bubble_h1(3, 4))
    assert trace.notes == trace.unsplit == ()
    measured = replace(trace, unsplit=((0, "0.weight"), (2, "4.a"), (2, "5.b")))
    first, second = measured.notes
    assert first.startswith("Stage 0:") and "0.weight" in first
    assert second.startswith("Stage 2:") and "4.a, 5.b" in second
    assert all("I did the full backward" in note and "W added nothing" in note for note in measured.notes)

"""Files that are no profile of a pipeline are refused with the reason; kernels of a GPU are what computes."""

from __future__ import annotations

import gzip
import json

import pytest

import gpipe_lab as gl
from gpipe_lab.plan.torch_profile import read_profile


def slice_of(name, category, start, end, thread=1, **args):
    found = {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "tid": thread,
        "pid": 0,
    }
    return found | {"args": args}


def label(name, start, end):
    """An operation of the host: its label, and one operator that takes half of its time."""
    return [
        slice_of(name, "user_annotation", start, end),
        slice_of("aten::linear", "cpu_op", (start + end) / 2, end),
    ]


def write(folder, ranks, **more):
    for rank, events in enumerate(ranks):
        (folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events, **more}))
    return sorted(folder.glob("rank*.json"))


def two_ranks():
    first = [*label("Forward 0", 0, 1000), *label("Backward 0", 2500, 4000)]
    return [first, [*label("Forward 0", 500, 1600), *label("Backward 0", 1600, 2600)]]


def test_the_wait_within_a_label_is_no_computation(tmp_path):
    trace = read_profile(write(tmp_path, two_ranks()))
    assert trace.schedule.ops == gl.gpipe(2, 1).ops
    spans = {str(e.op): (e.start_ms, e.end_ms) for e in trace.computations}
    assert spans == {"0F0": (0, 0.5), "1F0": (0.55, 1.1), "1B0": (1.6, 2.1), "0B0": (2.75, 3.5)}


def test_on_a_gpu_kernels_count_and_not_the_host(tmp_path):
    """The host launches in time that is not the GPU's, from any thread; what sends is left out."""
    ranks = two_ranks()
    for events in ranks:
        for number, event in enumerate([e for e in events if e["cat"] == "user_annotation"]):
            at = event["ts"] + 10
            begin = 10_000 * number + (5_000 if events is ranks[1] else 0)
            begin = {0: 10_000, 1: 40_000}[number] if events is ranks[0] else {0: 20_000, 1: 30_000}[number]
            for offset, name in ((0, "gemm"), (3_000, "relu"), (4_000, "ncclDevKernel_SendRecv")):
                key = len(events)
                events.append(slice_of("cudaLaunchKernel", "cuda_runtime", at, at + 1, 7, correlation=key))
                span = begin + offset, begin + offset + 900
                events.append(slice_of(name, "kernel", *span, 20, correlation=key))
    trace = read_profile(write(tmp_path, ranks, deviceProperties=[{"name": "GPU X"}]))
    assert [(str(e.op), e.start_ms, e.end_ms) for e in trace.computations] == [
        ("0F0", 0.0, 3.9), ("1F0", 10.0, 13.9), ("1B0", 20.0, 23.9), ("0B0", 30.0, 33.9),
    ]  # fmt: skip
    assert trace.device == "GPU X, profiled by torch"


@pytest.mark.parametrize("offset_us", [-4e9, -300, 0, 300, 4e9])
def test_clocks_that_differ_are_moved_by_the_middle_of_what_messages_allow(tmp_path, offset_us):
    ranks = two_ranks()
    for event in ranks[1]:
        event["ts"] += offset_us
    trace = read_profile(write(tmp_path, ranks))
    spans = {str(e.op): (e.start_ms, e.end_ms) for e in trace.computations}
    if offset_us:  # between 0F0 and 0B0 lie 2.25 ms, of which rank 1 takes 1.55
        first, last = spans["1F0"][0], spans["1B0"][1]
        assert first - 0.5 == pytest.approx(2.75 - last, abs=1e-3) or abs(offset_us) == 300
    assert spans["0F0"][1] <= spans["1F0"][0] + 0.051 and spans["1B0"][1] <= spans["0B0"][0] + 0.051


WORLD = {"rank": 0, "world_size": 2, "pg_config": [{"ranks": [0, 1]}]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no JSON"),
        (b"\x1f\x8b\x00\x00", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "no trace in torch.profiler's format"),
        (b"{}", "no trace in torch.profiler's format"),
        (b'{"traceEvents": 3}', "no trace in torch.profiler's format"),
        (b'{"traceEvents": [3]}', "no trace in torch.profiler's format"),
        (b'{"traceEvents": [{"ph": "X"}]}', "no trace in torch.profiler's format"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "b", "dur": 1, "tid": 1}]}', "no trace in torch"),
        (b'{"traceEvents": []}', "neither a label"),
        (json.dumps({"traceEvents": [], "distributedInfo": WORLD}).encode(), r"groups are \[0, 1\]"),
        (json.dumps({"traceEvents": label("PP:1F0", 0, 9)}).encode(), "every rank of a pipeline"),
        (json.dumps({"traceEvents": label("PP:(0F1;1B0)OVERLAP_F_B", 0, 9)}).encode(), "run as one"),
        (json.dumps({"traceEvents": label("Backward 0", 0, 9)}).encode(), "forward"),
        (json.dumps({"traceEvents": label("Forward 1", 0, 9)}).encode(), "every micro-batch"),
        (json.dumps({"traceEvents": label("Forward 99999999", 0, 9)}).encode(), "every micro-batch"),
        (json.dumps({"traceEvents": label("Forward 0", 0, float("nan"))}).encode(), "no trace in torch"),
        (b"[" * 100_000, "no JSON"),
        (gzip.compress(b"{}" * 999)[:9] + b"torn by hand", "no JSON"),
    ],
)
def test_what_is_no_profile_of_a_pipeline_is_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(gl.InputError, match=reason):
        read_profile(path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(gl.InputError, match="No such file"):
        read_profile(tmp_path / "rank*.json")
    with pytest.raises(gl.InputError, match="no file"):
        read_profile([])
    files = write(tmp_path, two_ranks())
    with pytest.raises(gl.InputError, match="another rank"):
        read_profile([files[0], files[0]])
    same_stage = write(tmp_path, [label("PP:0F0", 0, 9), label("PP:0F0", 0, 9)])
    with pytest.raises(gl.InputError, match="files of two ranks"):
        read_profile(same_stage)
    ranks = two_ranks()
    for event in ranks[1][2:]:
        event["ts"] += 3000  # its backward ends after the first rank's began
    with pytest.raises(gl.InputError, match="too early on any clock"):
        read_profile(write(tmp_path, ranks))

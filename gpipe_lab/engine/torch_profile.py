"""torch's profiler around one rank's step, with a name for every operation of the schedule."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from ..plan.ops import Op


def label(op: Op) -> str:
    """What an operation is called in a profile, as "F stage 2 micro-batch 0".

    >>> from gpipe_lab.plan.ops import Kind
    >>> label(Op(Kind.R, 2, 0, 1))
    'R stage 2 micro-batch 0 segment 1'
    """
    segment = f" segment {op.segment}" if op.segment else ""
    return f"{op.kind.value} stage {op.stage} micro-batch {op.microbatch}{segment}"


@dataclass
class Recording:
    """The profile of what ran inside `recorded`: JSON in the Chrome trace event format, once it has ended."""

    content: bytes = b""


@contextmanager
def recorded(is_wanted: bool, scratch: str) -> Iterator[Recording]:
    """Profile what runs inside, if it is wanted. `scratch` is a folder for a file that is gone afterwards."""
    recording = Recording()
    if not is_wanted:
        yield recording
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        yield recording
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = os.path.join(folder, "profile.json")
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            recording.content = file.read()

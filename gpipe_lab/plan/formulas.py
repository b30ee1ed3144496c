"""Closed forms, each with its source and the conditions under which it holds.

P stages, M micro-batches, equal stages, messages that take no time. Times in ms per micro-batch.
"""

from __future__ import annotations


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """(P-1)/(M+P-1): the idle share of GPipe and 1F1B (GPipe §2.3), whatever Tb/Tf is. naive: M = 1."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def bubble_overhead(num_stages: int, num_microbatches: int) -> float:
    """(P-1)/M: the idle time over the ideal time, the other thing called "bubble" (Megatron-LM §2.2)."""
    return (num_stages - 1) / num_microbatches


def pipeline_ms(num_stages: int, num_microbatches: int, forward_ms: float, backward_ms: float) -> float:
    """(M+P-1)(Tf+Tb): the makespan of GPipe and 1F1B."""
    return (num_microbatches + num_stages - 1) * (forward_ms + backward_ms)


def naive_ms(num_stages: int, num_microbatches: int, forward_ms: float, backward_ms: float) -> float:
    """M·P·(Tf+Tb): one micro-batch in the pipeline at a time."""
    return num_microbatches * num_stages * (forward_ms + backward_ms)


def microbatches_for(utilisation: float, num_stages: int) -> float:
    """M ≥ (P-1)u/(1-u): the micro-batches that keep the stages busy for a share u of the time."""
    return (num_stages - 1) * utilisation / (1 - utilisation)


def laundry_minutes(machine_minutes: list[float], num_loads: int) -> float:
    """sum + (n-1)·max: when the last of n loads leaves a line of machines that need not be equal."""
    return sum(machine_minutes) + (num_loads - 1) * max(machine_minutes)


def peak_in_flight(schedule_name: str, num_stages: int, num_microbatches: int, stage: int) -> int:
    """Micro-batches held by a stage at the peak: naive 1, gpipe M, one_f_one_b min(P-k, M)."""
    peaks = {
        "naive": 1,
        "forward_only": 0,
        "gpipe": num_microbatches,
        "one_f_one_b": min(num_stages - stage, num_microbatches),
    }
    return peaks[schedule_name]

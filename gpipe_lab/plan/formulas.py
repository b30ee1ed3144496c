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


def interleaved_bubble_fraction(num_ranks: int, num_microbatches: int, num_chunks: int) -> float:
    """(P-1)/(vM+P-1): v chunks fill and drain in steps of a chunk (Megatron-LM §2.2). M a multiple of P."""
    return (num_ranks - 1) / (num_chunks * num_microbatches + num_ranks - 1)


def interleaved_ms(
    num_ranks: int, num_microbatches: int, num_chunks: int, forward_ms: float, backward_ms: float
) -> float:
    """(vM+P-1)(Tf+Tb) with the times of one chunk: the makespan of interleaved. M a multiple of P."""
    return (num_chunks * num_microbatches + num_ranks - 1) * (forward_ms + backward_ms)


def interleaved_peak(num_ranks: int, num_microbatches: int, num_chunks: int, rank: int = 0) -> int:
    """min(vM, (v+1)P-1-2k): chunks of activations held by rank k at the peak. M a multiple of P.

    A chunk is 1/v of what a rank of 1F1B saves, so rank 0 holds 1+(P-1)/(Pv) times 1F1B's peak if M > P.
    """
    return min(num_chunks * num_microbatches, (num_chunks + 1) * num_ranks - 1 - 2 * rank)


def num_messages(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> int:
    """2M(vP-1): activations and gradients between ranks in one step, v chunks looped over the ranks."""
    if num_ranks == 1:
        return 0
    return 2 * num_microbatches * (num_chunks * num_ranks - 1)


def zero_bubble_h1_bubble_ms(num_stages: int, forward_ms: float, input_ms: float, weight_ms: float) -> float:
    """(P-1)(F+I-W): makespan less M(F+I+W), for M ≥ P, where W is the shortest (Zero Bubble §2.3).

    In general (P-1)·max(F+I-W, F, I): with P micro-batches in flight the last rank waits (P-1)F for its
    first forward, and the first rank (P-1)I for its first gradient.
    """
    return (num_stages - 1) * max(forward_ms + input_ms - weight_ms, forward_ms, input_ms)


def zero_bubble_h2_bubble_ms(num_stages: int, forward_ms: float, input_ms: float, weight_ms: float) -> float:
    """(P-1)(F+I-2W): longest time from a rank's first to its last operation, less M(F+I+W). M ≥ 2P-1.

    Holds where W is at most F and at most (F+I)/2 (Zero Bubble §2.3); in general
    (P-1)·max(F+I-2W, I-F, 0). Rank k starts k·F after rank 0, which this does not count.
    """
    excess = max(forward_ms + input_ms - 2 * weight_ms, input_ms - forward_ms, 0.0)
    return (num_stages - 1) * excess


def peak_in_flight(schedule_name: str, num_stages: int, num_microbatches: int, stage: int) -> int:
    """Micro-batches held by a stage at the peak, where every rank has one stage.

    naive 1, gpipe M, one_f_one_b min(P-k, M), zero_bubble_h1 min(P, M), zero_bubble_h2 min(2P-1, M).
    """
    peaks = {
        "naive": 1,
        "forward_only": 0,
        "gpipe": num_microbatches,
        "one_f_one_b": min(num_stages - stage, num_microbatches),
        "zero_bubble_h1": min(num_stages, num_microbatches),
        "zero_bubble_h2": min(2 * num_stages - 1, num_microbatches),
    }
    return peaks[schedule_name]


def zero_bubble_v_peak(num_ranks: int, num_microbatches: int, rank: int = 0) -> int:
    """min(2P, 2M, M+k+1): half stages held by rank k at the peak (Zero Bubble §6: 2P halves, as 1F1B)."""
    return min(2 * num_ranks, 2 * num_microbatches, num_microbatches + rank + 1)

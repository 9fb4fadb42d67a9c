"""Eviction order: which of two nodes goes first. Arithmetic only, the same for every adapter.

Every node has a priority on the index's own clock, a count of uses in one process, microseconds in
a shared index. The lowest goes first.

    priority = time of last use + age * (min(hits, MAX_HITS) + worth)
    worth    = clip(cost per byte / average cost per byte - 1, -MAX_WORTH_LOSS, MAX_WORTH_GAIN)

`age` is the running mean of how long ago victims had been used when they were evicted: what was
never hit stays for about one `age`, what was hit once for two, so that chunks seen once leave
quickly and a scan does not push out what recurs. `worth` keeps longer what costs more to compute
for the bytes it takes. A parent's priority is above its children's.

On traces that resemble retrieval (`tests/unit/test_eviction.py`) this finds 1.03 to 1.25 times the
bytes that least-recently-used finds, 0.98 where the hot set changes too fast for any counting. Of
`MAX_HITS` from 1 to 8, more win where popularity is steady and lose where it moves.

Source: the aging of GreedyDual-Size-Frequency (Cherkasova, HP Labs HPL-98-69R1, 1998), with the
clock itself in place of the inflation value, so that a node is touched without reading others.
"""

from __future__ import annotations

MAX_HITS = 3
MAX_WORTH_LOSS = 0.5
MAX_WORTH_GAIN = 3.0
SMOOTHING = 1 / 64
"""Weight of the newest sample in both running means."""


def worth(compute_us: int, payload_bytes: int, mean_cost: float) -> float:
    """How much longer than an average node one is worth keeping, in units of `age`.

    Args:
        compute_us: Microseconds to compute it again; 0, unknown, is average.
        payload_bytes: Its size.
        mean_cost: Running mean of microseconds per byte; 0, unknown, makes all average.
    """
    if compute_us <= 0 or mean_cost <= 0:
        return 0.0
    relative = compute_us / max(payload_bytes, 1) / mean_cost
    return min(max(relative - 1, -MAX_WORTH_LOSS), MAX_WORTH_GAIN)


def bonus(num_hits: int, node_worth: float, age: float) -> int:
    """What is added to a node's time of last use, in units of the clock; may be negative."""
    return int(age * (min(num_hits, MAX_HITS) + node_worth))


def smoothed(mean: float, sample: float) -> float:
    """The running mean with one more sample; the first sample is the mean."""
    return sample if mean <= 0 else mean + SMOOTHING * (sample - mean)

"""What is worth loading, and how long a request waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Barrier, Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.prefetch import LoadPlan, Prefetch, Run, plan_loads
from sglang_ext.chunk_index.transfer import CostModel, Line, is_worth_loading
from sglang_ext.chunk_index.transfer_queues import Load
from tests.blobs import random_payload, record_of
from tests.strategies import BytesPayload, node_record

Loads = list[tuple[int, Load[BytesPayload]]]


def cost(fixed_ms: float, ms_per_unit: float) -> CostModel:
    model = CostModel()
    model.renew(Line(fixed_ms, ms_per_unit))
    return model


def chain(name: str, num_segments: int, **fields: Any) -> tuple[NodeRecord, ...]:
    """The records of a chunk, each of 100 bytes and 10 tokens."""
    return tuple(node_record(f"{name}{number}", **fields) for number in range(num_segments))


FREE = cost(0.0, 0.0)
COMPUTE = cost(0.0, 1.0)  # 10 ms a segment
PLENTY = 1 << 40
PAYLOAD = random_payload(10)


# Planning


def test_what_the_arena_lacks_is_loaded_from_the_fastest_tier_that_has_it() -> None:
    chunk = chain("a", 5)
    found = [[chunk[:3]], [chunk]]
    plan = plan_loads([1], found, [FREE, FREE], COMPUTE, PLENTY)
    assert plan.chunks == ((Run(0, chunk[1:3]), Run(1, chunk[3:])),)
    assert (plan.num_declined, plan.num_segments) == (0, 4)
    assert (plan.num_bytes, plan.num_tokens) == (400, 40)


def test_chunks_that_are_here_or_nowhere_need_nothing() -> None:
    here = chain("a", 3)
    plan = plan_loads([3, 0], [[here, ()], [here, ()]], [FREE, FREE], COMPUTE, PLENTY)
    assert plan == LoadPlan(((), ()), 0)


def test_without_lower_tiers_there_is_nothing_to_load() -> None:
    assert plan_loads([2, 0], [], [], COMPUTE, PLENTY) == LoadPlan(((), ()), 0)


def test_what_is_faster_computed_is_declined() -> None:
    chunk = chain("a", 3)
    slow = cost(0.0, 0.2)  # 20 ms a segment
    assert plan_loads([0], [[chunk]], [slow], COMPUTE, PLENTY) == LoadPlan(((),), 3)


def test_a_run_too_short_for_a_tiers_fixed_cost_is_declined_and_a_longer_one_is_not() -> None:
    chunk = chain("a", 5)
    far = cost(25.0, 0.0)
    assert plan_loads([3], [[chunk]], [far], COMPUTE, PLENTY).num_declined == 2
    assert plan_loads([2], [[chunk]], [far], COMPUTE, PLENTY).num_segments == 3


def test_what_one_tier_declines_and_a_slower_one_loads_is_not_declined() -> None:
    """The slower tier has more of the chunk, for which its cost pays."""
    chunk = chain("a", 5)
    plan = plan_loads([0], [[chunk[:1]], [chunk]], [cost(25.0, 0.0)] * 2, COMPUTE, PLENTY)
    assert plan == LoadPlan(((Run(1, chunk),),), 0)


def test_a_segment_that_two_tiers_decline_is_declined_once() -> None:
    chunk = chain("a", 3)
    slow = cost(1e6, 0.0)
    assert plan_loads([0], [[chunk], [chunk]], [slow, slow], COMPUTE, PLENTY).num_declined == 3


def test_a_run_beyond_the_bound_is_declined_and_a_smaller_one_still_loaded() -> None:
    large, small = chain("a", 3), chain("b", 2)
    plan = plan_loads([0, 0], [[large, small]], [FREE], COMPUTE, 250)
    assert plan == LoadPlan(((), (Run(0, small),)), 3)


def test_all_runs_of_a_prompt_together_keep_to_the_bound() -> None:
    a, b = chain("a", 2), chain("b", 2)
    plan = plan_loads([0, 0], [[a, b]], [FREE], COMPUTE, 350)
    assert plan == LoadPlan(((Run(0, a),), ()), 2)


def test_while_nothing_tells_what_computing_costs_everything_is_loaded() -> None:
    chunk = chain("a", 3)
    assert plan_loads([0], [[chunk]], [cost(1e6, 1.0)], CostModel(), PLENTY).num_declined == 0


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Chunks of which arena and tiers have leading parts, with any costs and bound."""
    sizes = st.tuples(st.integers(1, 200), st.integers(1, 50))
    chunks = [
        tuple(
            node_record(f"{chunk}-{at}", payload_bytes=num_bytes, num_tokens=num_tokens)
            for at, (num_bytes, num_tokens) in enumerate(draw(st.lists(sizes, max_size=6)))
        )
        for chunk in range(draw(st.integers(0, 5)))
    ]
    num_tiers = draw(st.integers(0, 3))
    costs = st.tuples(st.floats(0, 30), st.floats(0, 0.5))
    return {
        "num_here": [draw(st.integers(0, len(chunk))) for chunk in chunks],
        "found": [
            [chunk[: draw(st.integers(0, len(chunk)))] for chunk in chunks]
            for _ in range(num_tiers)
        ],
        "costs": [cost(*draw(costs)) for _ in range(num_tiers)],
        "compute": draw(st.sampled_from([CostModel(), cost(0.0, 1.0), cost(5.0, 0.3)])),
        "max_bytes": draw(st.integers(0, 1500)),
    }


@given(situations())
def test_every_plan_keeps_its_promises(situation: dict[str, Any]) -> None:
    num_here, found = situation["num_here"], situation["found"]
    plan = plan_loads(**situation)
    assert plan.num_bytes <= situation["max_bytes"]
    assert len(plan.chunks) == len(num_here)
    num_declined = 0
    for chunk, runs in enumerate(plan.chunks):
        assert all(left.tier < right.tier for left, right in pairwise(runs))
        position = num_here[chunk]
        for run in runs:
            assert run.records == tuple(found[run.tier][chunk][position:])
            assert run.records
            tier_cost = situation["costs"][run.tier]
            assert is_worth_loading(run.num_bytes, run.num_tokens, tier_cost, situation["compute"])
            position += len(run.records)
        longest = max((len(runs_of_tier[chunk]) for runs_of_tier in found), default=0)
        num_declined += max(0, longest - position)
    assert plan.num_declined == num_declined


@given(situations())
def test_a_run_is_left_out_only_if_computing_is_no_slower_or_the_bound_is_reached(
    situation: dict[str, Any],
) -> None:
    plan = plan_loads(**situation)
    left = situation["max_bytes"]
    for chunk, runs in enumerate(plan.chunks):
        position = situation["num_here"][chunk]
        chosen = {run.tier: run for run in runs}
        for tier, runs_of_tier in enumerate(situation["found"]):
            run = Run(tier, tuple(runs_of_tier[chunk][position:]))
            if tier in chosen:
                left -= run.num_bytes
                position += len(run.records)
            elif run.records and run.num_bytes <= left:
                costs = situation["costs"][tier], situation["compute"]
                assert not is_worth_loading(run.num_bytes, run.num_tokens, *costs)


# Waiting, with a clock that the test moves


class Rig:
    """A prefetch of chunks of 10-byte segments, whose loads the test finishes.

    It begins at 100 s, and gives a look-up 20 s and a tier without a sign of life 50 s.
    """

    def __init__(self, *num_segments: int, limit_s: float = 1000) -> None:
        self.num_arrived = 0
        self.prefetch: Prefetch[BytesPayload] = Prefetch(
            started_s=100, lookup_limit_s=20, stall_s=50, num_arrived=lambda: self.num_arrived
        )
        self.chunks: list[Loads] = [
            [(0, Load(record_of(random_payload(10, at), f"{chunk}-{at}"))) for at in range(num)]
            for chunk, num in enumerate(num_segments)
        ]
        self.limit_s = limit_s

    def begin(self, now_s: float = 100, num_declined: int = 0) -> None:
        self.prefetch.begin(self.chunks, self.limit_s, num_declined, now_s)

    def load(self, chunk: int, at: int) -> Load[BytesPayload]:
        return self.chunks[chunk][at][1]

    def arrive(self, chunk: int, at: int) -> None:
        """A whole payload comes."""
        self.num_arrived += 10
        self.load(chunk, at).finish(random_payload(10, at))

    def keys(self, *places: tuple[int, int]) -> set[bytes]:
        return {self.load(chunk, at).record.key for chunk, at in places}


def test_it_is_settled_as_soon_as_every_load_is_done() -> None:
    rig = Rig(2, 1)
    rig.begin()
    for place in ((0, 0), (0, 1), (1, 0)):
        assert not rig.prefetch.check(110)
        rig.arrive(*place)
    assert rig.prefetch.check(120)
    assert rig.prefetch.is_settled
    assert rig.prefetch.waited_ms == 20_000
    assert set(rig.prefetch.payloads) == rig.keys((0, 0), (0, 1), (1, 0))
    assert rig.prefetch.num_bytes == {0: 30}
    assert rig.prefetch.num_late == 0


def test_it_is_settled_at_the_deadline_which_counts_from_the_end_of_the_lookup() -> None:
    rig = Rig(2, limit_s=300)
    rig.begin(now_s=115)
    for now_s in range(115, 415, 10):
        rig.num_arrived += 1
        assert not rig.prefetch.check(now_s)
    rig.arrive(0, 0)
    assert not rig.prefetch.check(414)
    assert rig.prefetch.check(415)
    assert set(rig.prefetch.payloads) == rig.keys((0, 0))
    assert rig.prefetch.num_late == 1
    assert rig.prefetch.waited_ms == 315_000


def test_it_is_settled_when_no_byte_came_for_the_stall_time() -> None:
    rig = Rig(2)
    rig.begin()
    assert not rig.prefetch.check(140)
    rig.num_arrived += 1
    assert not rig.prefetch.check(149)
    assert not rig.prefetch.check(198)
    assert rig.prefetch.check(199)
    assert rig.prefetch.payloads == {}
    assert rig.prefetch.num_late == 2


def test_the_stall_time_counts_from_the_beginning_even_if_nobody_looked_meanwhile() -> None:
    rig = Rig(1)
    rig.num_arrived = 1000  # for others, before
    rig.begin()
    assert rig.prefetch.check(150)


def test_bytes_of_others_loads_show_that_a_tier_is_alive() -> None:
    rig = Rig(1)
    rig.begin()
    for now_s in range(140, 900, 40):
        rig.num_arrived += 1  # none of ours
        assert not rig.prefetch.check(now_s)
    assert rig.prefetch.check(now_s + 50)


def test_a_lookup_that_takes_too_long_is_not_waited_for() -> None:
    rig = Rig(1)
    assert not rig.prefetch.check(119)
    assert rig.prefetch.check(120)
    assert rig.prefetch.waited_ms == 20_000


def test_loads_that_begin_after_it_was_settled_still_land() -> None:
    rig = Rig(1)
    assert rig.prefetch.check(120)
    rig.begin(now_s=130)
    rig.arrive(0, 0)
    assert rig.prefetch.take_landed(0) == rig.chunks[0]
    assert rig.prefetch.check(140)
    assert rig.prefetch.payloads == {}


def test_what_was_settled_stays_settled_and_sums_are_taken_once() -> None:
    rig = Rig(2, limit_s=10)
    rig.begin()
    rig.arrive(0, 0)
    assert rig.prefetch.check(110)
    rig.arrive(0, 1)
    assert rig.prefetch.check(600)
    assert rig.prefetch.waited_ms == 10_000
    assert (rig.prefetch.num_late, rig.prefetch.num_bytes) == (1, {0: 10})
    assert set(rig.prefetch.payloads) == rig.keys((0, 0))


def test_a_failed_load_makes_what_is_behind_it_in_its_chunk_useless_and_nothing_else() -> None:
    rig = Rig(3, 2)
    rig.begin()
    rig.load(0, 1).finish(None)
    for place in ((0, 0), (0, 2), (1, 0), (1, 1)):
        rig.arrive(*place)
    assert rig.prefetch.check(100)
    assert set(rig.prefetch.payloads) == rig.keys((0, 0), (1, 0), (1, 1))
    assert rig.prefetch.num_bytes == {0: 30}
    assert rig.prefetch.num_late == 0


def test_a_late_load_makes_what_is_behind_it_useless_and_only_missing_ones_are_late() -> None:
    rig = Rig(4, limit_s=10)
    rig.begin()
    for at in (0, 2):
        rig.arrive(0, at)
    assert rig.prefetch.check(110)
    assert set(rig.prefetch.payloads) == rig.keys((0, 0))
    assert rig.prefetch.num_late == 2


def test_bytes_are_summed_by_tier() -> None:
    rig = Rig(3)
    rig.chunks[0] = [(tier, load) for tier, (_, load) in zip((0, 2, 2), rig.chunks[0], strict=True)]
    rig.begin()
    for at in range(3):
        rig.arrive(0, at)
    assert rig.prefetch.check(100)
    assert rig.prefetch.num_bytes == {0: 10, 2: 20}
    assert rig.prefetch.num_bytes[1] == 0


def test_with_nothing_to_load_it_is_settled_at_once() -> None:
    rig = Rig(0, 0)
    rig.begin(num_declined=3)
    assert rig.prefetch.check(100)
    assert rig.prefetch.num_declined == 3


@pytest.mark.parametrize(
    ("num_segments", "num_declined", "is_empty"), [(0, 0, True), (0, 1, False), (1, 0, False)]
)
def test_it_is_empty_if_the_lookup_found_nothing(
    num_segments: int, num_declined: int, is_empty: bool
) -> None:
    rig = Rig(num_segments)
    assert not rig.prefetch.is_empty  # nobody knows yet
    rig.begin(num_declined=num_declined)
    assert rig.prefetch.is_empty == is_empty


# What has come


def test_what_has_come_is_taken_in_order_and_once() -> None:
    rig = Rig(3)
    rig.begin()
    rig.arrive(0, 1)
    assert rig.prefetch.take_landed(0) == []
    rig.arrive(0, 0)
    assert rig.prefetch.take_landed(0) == rig.chunks[0][:2]
    assert rig.prefetch.take_landed(0) == []
    rig.arrive(0, 2)
    assert rig.prefetch.take_landed(0) == rig.chunks[0][2:]


def test_nothing_behind_a_failed_load_is_taken() -> None:
    rig = Rig(3)
    rig.begin()
    rig.arrive(0, 0)
    rig.load(0, 1).finish(None)
    rig.arrive(0, 2)
    assert rig.prefetch.take_landed(0) == rig.chunks[0][:1]
    assert rig.prefetch.take_landed(0) == []


def test_released_payloads_are_let_go_and_late_ones_still_land() -> None:
    rig = Rig(2, limit_s=10)
    rig.begin()
    late = rig.chunks[0][1]
    rig.arrive(0, 0)
    rig.prefetch.take_landed(0)
    assert rig.prefetch.check(110)
    payload = weakref.ref(next(iter(rig.prefetch.payloads.values())))
    rig.chunks = []
    assert payload() is not None
    rig.prefetch.release()
    assert payload() is None
    late[1].finish(random_payload(10, 1))
    assert rig.prefetch.take_landed(0) == [late]


class Noticing:
    """A load that has come; lets something happen when it is first looked at."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.is_done = True
        self._meanwhile: Callable[[], object] | None = meanwhile

    @property
    def payload(self) -> BytesPayload:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return PAYLOAD


def test_a_load_that_one_thread_is_taking_is_not_taken_by_another() -> None:
    rig = Rig(0)
    taken: list[Any] = []
    other = Thread(target=lambda: taken.append(rig.prefetch.take_landed(0)))

    def interrupt() -> None:
        other.start()
        other.join(0.05)  # it either waits for us, or is done by then

    load: Any = Noticing(interrupt)
    rig.chunks = [[(0, load)]]
    rig.begin()
    taken.append(rig.prefetch.take_landed(0))
    other.join()
    assert sorted(taken, key=len) == [[], [(0, load)]]


def test_threads_take_each_load_once_and_in_order() -> None:
    rig = Rig(200)
    rig.begin()
    order = list(range(200))
    barrier = Barrier(4)
    taken: list[Loads] = []

    def finish(mine: Sequence[int]) -> None:
        barrier.wait()
        for at in mine:
            rig.load(0, at).finish(PAYLOAD)
            landed = rig.prefetch.take_landed(0)
            if landed:
                taken.append(landed)

    threads = [Thread(target=finish, args=(order[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    position = {id(load): at for at, (_, load) in enumerate(rig.chunks[0])}
    taken.sort(key=lambda landed: position[id(landed[0][1])])
    assert [part for landed in taken for part in landed] == rig.chunks[0]

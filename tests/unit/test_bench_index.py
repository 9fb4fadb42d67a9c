"""The index benchmark's own arithmetic: entries, times, sizes of round trips, aims."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.bench_disk import DiskReport, measure_disk, parse_dd
from sglang_ext.scripts.bench_entries import (
    LONG_CHUNK,
    OWNERS,
    PROMPT_SEGMENTS,
    Entries,
    now_ms,
)
from sglang_ext.scripts.bench_index import Report, make_content, make_targets
from sglang_ext.scripts.bench_operations import Row
from sglang_ext.scripts.bench_timing import (
    Background,
    Stopwatch,
    Timings,
    make_bare_trip,
    pace,
    pack,
)

SHAPES = st.sampled_from([1, LONG_CHUNK])


@given(num_entries=st.integers(0, 200))
def test_a_population_has_as_many_records_as_it_says_all_different(num_entries: int) -> None:
    records = [record for chunk in Entries(num_entries, 0).chunks() for record in chunk]
    assert len({record.key for record in records}) == num_entries


@given(num_entries=st.integers(1, 60), step=st.integers(1, 4))
def test_threads_that_share_a_population_publish_each_chunk_once(
    num_entries: int, step: int
) -> None:
    entries = Entries(num_entries, 0)
    shared = [chunk for start in range(step) for chunk in entries.chunks(start, step)]
    assert sorted(shared, key=repr) == sorted(entries.chunks(), key=repr)


@given(shape=SHAPES, number=st.integers(0, 1000))
def test_a_chunks_records_are_linked_and_lie_in_one_place(shape: int, number: int) -> None:
    entries = Entries(8000, 5)
    records = entries.records(shape, number)
    assert tuple(record.key for record in records) == entries.path(shape, number)
    assert [record.parent for record in records] == [None, *(r.key for r in records[:-1])]
    assert len({record.key[0] for record in records}) == 1
    assert len({record.owner for record in records}) == 1


def test_populations_of_other_names_share_no_keys() -> None:
    one, other = (Entries(40, 0, name) for name in ("one", "other"))
    ours, theirs = ({r.key for chunk in e.chunks() for r in chunk} for e in (one, other))
    assert not ours & theirs


@pytest.mark.parametrize("shape", [1, LONG_CHUNK])
def test_prompts_draw_different_segments_of_the_population_and_repeat_for_a_seed(
    shape: int,
) -> None:
    entries = Entries(1000, 0)
    known = {record.key for chunk in entries.chunks() for record in chunk}
    prompts = list(islice(entries.prompts(shape, seed=3), 5))
    for prompt in prompts:
        assert {len(path) for path in prompt} == {shape}
        keys = {key for path in prompt for key in path}
        assert len(keys) == PROMPT_SEGMENTS
        assert keys <= known
    assert prompts == list(islice(entries.prompts(shape, seed=3), 5))
    assert prompts[0] != prompts[1]


def test_every_tenant_has_chunks() -> None:
    owners = {record.owner for chunk in Entries(100, 0).chunks() for record in chunk}
    assert owners == set(OWNERS)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0.001, 1))
def test_a_quantile_is_a_measured_value_that_enough_do_not_exceed(
    ms: list[float], share: float
) -> None:
    quantile = Timings(tuple(ms), 1.0).quantile_ms(share)
    assert quantile in ms
    assert sum(value <= quantile for value in ms) >= share * len(ms) - 1e-6
    assert sum(value < quantile for value in ms) < share * len(ms)


def test_quantiles_and_rate_of_a_hundred_calls() -> None:
    timings = Timings(tuple(float(ms) for ms in range(1, 101)), elapsed_s=4.0)
    assert (timings.p50_ms, timings.p99_ms, timings.slowest_ms) == (50, 99, 100)
    assert timings.rate_per_s == 25


def test_a_call_that_raises_is_not_counted() -> None:
    watch = Stopwatch()
    assert watch.time(int, "5") == 5
    with pytest.raises(ValueError, match="invalid"):
        watch.time(int, "five")
    assert len(watch.timings().ms) == 1


class Clock:
    """Time that passes only while somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps_s: list[float] = []

    def read(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def step(self, works_s: float) -> None:
        self.steps_s.append(self.now_s - 100)
        self.pass_s(works_s)


def test_steps_keep_their_pace_however_long_they_take() -> None:
    clock = Clock()
    pace(4, lambda passed_s: passed_s >= 2, lambda: clock.step(0.125), clock.read, clock.pass_s)
    assert clock.steps_s == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]


def test_steps_that_are_late_are_made_up_for() -> None:
    clock = Clock()
    works_s = iter([1.0, *[0.125] * 8])

    def is_over(passed_s: float) -> bool:
        return len(clock.steps_s) >= 9

    pace(4, is_over, lambda: clock.step(next(works_s)), clock.read, clock.pass_s)
    assert clock.steps_s == [0, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 2]


def test_what_fails_in_the_background_fails_the_block() -> None:
    def fail(is_over: Event) -> None:
        raise ServerFailed("broken")

    with pytest.raises(ServerFailed, match="broken"), Background(fail) as background:
        background.wait(20)


def test_what_runs_in_the_background_is_told_of_the_end_of_its_block() -> None:
    was_told: list[bool] = []
    with Background(lambda is_over: was_told.append(is_over.wait(20))) as background:
        assert not background.is_done
    assert was_told == [True]
    assert background.is_done


@given(
    names=st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=100),
    data=st.data(),
)
def test_a_bare_round_trip_has_the_size_of_a_look_up_up_to_a_few_bytes(
    names: list[bytes], data: st.DataObject
) -> None:
    sizes = data.draw(
        st.lists(st.integers(30, 400), min_size=len(names), max_size=len(names)), label="sizes"
    )
    trip = make_bare_trip(names, sizes)
    request = pack([b"MGET", *names])
    reply = b"*%d\r\n" % len(sizes) + b"".join(
        b"$%d\r\n%b\r\n" % (size, b"x" * size) for size in sizes
    )
    smallest = len(pack([b"MGET", b"bench:bare", b""]))
    assert max(len(request), smallest) - 2 <= len(trip.request) <= max(len(request), smallest)
    assert len(reply) - 2 <= trip.num_reply_bytes <= len(reply)


def test_a_command_is_packed_as_redis_takes_it() -> None:
    assert pack([b"GET", b"a\r\n"]) == b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"


def test_the_time_of_dd_is_what_it_says() -> None:
    said = "1+1 records in\n1+1 records out\n5902336 bytes (5.9 MB, 5.6 MiB) copied, "
    assert parse_dd(said + "0.00435 s, 1.4 GB/s\n") == 0.00435
    assert parse_dd(said + "4e-05 s, 1.4 GB/s\n") == 4e-05
    with pytest.raises(ServerFailed, match="No such file"):
        parse_dd("dd: failed to open 'x': No such file or directory")


def test_every_file_is_read_by_the_store_and_by_dd(tmp_path: object) -> None:
    report = measure_disk(tmp_path / "kv", num_files=2, num_pairs=2, created_ms=now_ms())  # type: ignore[operator]
    assert (report.num_files, report.num_pairs) == (2, 2)
    assert min(report.share, report.threads_share, report.mib_per_s, report.dd_mib_per_s) > 0


def row(op: str = "match", **fields: object) -> Row:
    made = Row(
        entries=1000,
        backend="redis-unix",
        op=op,
        prompt="64x1",
        p50_ms=0.5,
        p99_ms=2.0,
        slowest_ms=4.0,
        rate_per_s=200.0,
        num_calls=1000,
        num_late=0,
        bare_rtt_ms=0.1,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def report(*matches: Row, **fields: object) -> Report:
    rows = (*matches, row("match evicting", slowest_ms=7.0), row("match at rest", slowest_ms=6.0))
    made = Report(
        rows=rows,
        fill_rate_per_s=1e4,
        bytes_per_entry=370.0,
        near_cache_p50_us=90.0,
        redis_down_added_ms=0.2,
        redis_down_p99_ms=0.4,
        redis_down_first_ms=6.0,
        start_black_hole_added_ms=10.0,
        disk=DiskReport(0.9, 1.2, 900.0, 1000.0, 1.0, 5, 4),
        redis_version="7.0.15",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def missed(made: Report) -> list[str]:
    return [target.name for target in make_targets(made) if not target.is_met]


def test_every_aim_is_met_by_numbers_within_it() -> None:
    assert missed(report(row())) == []


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (report(row(p50_ms=1.01)), "match 64x1, redis-unix, p50"),
        (report(row(p99_ms=3.01)), "match 64x1, redis-unix, p99"),
        (report(row(), near_cache_p50_us=201.0), "look-up in the near index, p50"),
        (report(row(), bytes_per_entry=401.0), "Redis memory of an entry"),
        (report(row(), redis_down_added_ms=1.01), "Redis down, added to a request, p50"),
        (report(row(), start_black_hole_added_ms=2001.0), "address that swallows all, start"),
        (
            report(row(), disk=DiskReport(0.79, 1.2, 900.0, 1000.0, 1.0, 5, 4)),
            "disk by dd, one file at a time",
        ),
    ],
)
def test_a_number_beyond_its_aim_is_missed(made: Report, name: str) -> None:
    assert missed(made) == [name]


def test_a_look_up_may_take_three_bare_round_trips_where_that_is_more() -> None:
    assert missed(report(row(p50_ms=1.4, bare_rtt_ms=0.5))) == []
    assert missed(report(row(p50_ms=1.6, bare_rtt_ms=0.5))) == ["match 64x1, redis-unix, p50"]


def test_a_look_up_in_memory_has_no_aim() -> None:
    assert missed(report(row(backend="memory", p50_ms=9.0, bare_rtt_ms=None))) == []


def test_eviction_may_slow_a_look_up_by_five_milliseconds() -> None:
    rows = [row("match evicting", slowest_ms=30.0), row("match at rest", slowest_ms=25.1)]
    assert missed(replace(report(), rows=tuple(rows))) == []
    rows[1] = row("match at rest", slowest_ms=24.9)
    assert missed(replace(report(), rows=tuple(rows))) == [
        "slowest match while evicting, beyond at rest"
    ]


def test_the_file_has_each_number_by_its_name() -> None:
    content = make_content(report(row()))
    assert content["rows"][0]["bare_rtt_ms"] == 0.1
    assert content["disk_load_share"] == 0.9
    assert content["evict_added_ms"] == 1.0
    names = ("redis_down_added_ms", "near_cache_p50_us", "bytes_per_entry", "fill_rate_per_s")
    assert all(isinstance(content[name], float) for name in names)

"""Drills on payloads kept as Redis values, which come late, slowly, not at all, or find no room."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.drills.drill import (
    DELIMITER,
    NUM_THREADS,
    PATIENCE_S,
    STORES,
    Case,
    Outcome,
    Row,
    Served,
    StartRun,
    judge,
    metric_in,
    open_server,
)
from tests.drills.proxy import Proxy, open_proxy
from tests.redis_server import RedisServer, redis_server, wait_until

pytestmark = [pytest.mark.server, pytest.mark.redis]

STALL_MS = 50.0
"""The server's own default: longest that a request waits while no byte comes."""

TURN_MS = 30.0
"""Most that an idle scheduler may be late in seeing that a wait is over."""

LATENCY_S = 0.2
NEVER_S = 30.0
MAX_P99_RATIO, MAX_MEDIAN_RATIO = 1.5, 1.05
BLOCKS = ((13, 9),) * 4
"""Hits and misses of streams that take turns, so that both meet the same noise."""

BANDWIDTHS = (None, 20e6, 2e6)
"""Bytes a second, the fastest first: a tier found too slow is measured again after a minute."""

NUM_LESSONS = 4
NUM_PAIRS = 6
RECOVERY_S = 10.0
REMEASURED_S = 90.0
READY = "sglang_pic_tier_ready"
MIB = 1 << 20


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(redis: RedisServer) -> Iterator[Proxy]:
    with open_proxy(int(redis.url.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def served(
    model_path: str, proxy: Proxy, cases: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("values")
    (folder / "secret").write_text("a secret of all servers")
    options = {
        "--pic-index": f"redis://127.0.0.1:{proxy.port}",
        "--pic-index-deadline-ms": "100",  # this machine may be busy
        "--pic-secret-file": str(folder / "secret"),
        "--pic-arena-mib": "24",
    }
    words = itertools.chain.from_iterable(options.items())
    with open_server(model_path, folder / "log", "--pic-shared-values", *words) as served:
        yield served


@pytest.fixture(autouse=True)
def clean(served: Served, redis: RedisServer) -> None:
    """Nothing is cached anywhere, and the server knows it."""
    redis.cli("FLUSHALL")
    redis.cli("CLIENT", "KILL", "TYPE", "pubsub")  # tells it that it may have missed something
    served.client.flush()


def test_a_stopped_redis_costs_a_request_no_more_than_the_longest_stall(
    served: Served, redis: RedisServer, cases: list[Case], rows: list[Row]
) -> None:
    name = "Redis values stopped"
    _store(served, redis, cases, name)
    with _judged(name, served, cases, rows) as outcomes:
        redis.pause()
        try:
            outcomes += [_hit(served, cases, name, number) for number in range(len(cases))]
        finally:
            redis.resume()
    assert any(outcome.load_ms for outcome in outcomes), "it was waited for"


def test_payloads_that_never_come_cost_a_request_no_more_than_the_longest_stall(
    served: Served, redis: RedisServer, cases: list[Case], rows: list[Row], proxy: Proxy
) -> None:
    """The index answers as ever."""
    name = "Redis values held back"
    _store(served, redis, cases, name)
    with _judged(name, served, cases, rows) as outcomes:
        proxy.latency_s = NEVER_S
        try:
            outcomes += [_hit(served, cases, name, number) for number in range(len(cases))]
        finally:
            proxy.latency_s = 0.0
    assert any(outcome.num_late for outcome in outcomes), "payloads were waited for"


@contextmanager
def _judged(
    name: str, served: Served, cases: list[Case], rows: list[Row]
) -> Iterator[list[Outcome]]:
    """Hits one at a time that may take what computing takes, one stall, and noise.

    Noise is twice the most that two equal requests, before and after, differed by.
    """
    before = _compute(served, cases, f"{name} before")
    outcomes: list[Outcome] = []
    yield outcomes
    recovered_s = _seconds_until_loaded(served, cases, name)
    after = _compute(served, cases, f"{name} after")
    times = [(one.elapsed_ms, other.elapsed_ms) for one, other in zip(before, after, strict=True)]
    noise_ms = max(max(pair) - min(pair) for pair in times)
    row = judge(name, outcomes, {n: max(pair) for n, pair in enumerate(times)}, recovered_s)
    rows.append(row)
    assert row.wrong == row.lost == 0, outcomes
    assert max(outcome.load_ms for outcome in outcomes) <= STALL_MS + TURN_MS, outcomes
    assert row.max_wait_ms <= STALL_MS + 2 * noise_ms, (noise_ms, outcomes)
    assert recovered_s < RECOVERY_S
    assert served.is_unharmed(), served.complaints()


def test_late_payloads_do_not_hold_up_a_stream_of_hits(
    served: Served, redis: RedisServer, cases: list[Case], proxy: Proxy, rows: list[Row]
) -> None:
    """Streams with and without anything cached take turns; 2 % of the hits are none."""
    name = "payload reads 200 ms late"
    _store(served, redis, cases, name)
    hits: list[Outcome] = []
    computed: list[Outcome] = []
    proxy.latency_s = LATENCY_S
    try:
        for block, (num_hits, num_computed) in enumerate(BLOCKS):
            namespaces = [name if block + n else f"{name} new" for n in range(num_hits)]
            hits += _stream(served, cases, namespaces)
            namespaces = [f"{name} {block} {n}" for n in range(num_computed)]
            computed += _stream(served, cases, namespaces)
    finally:
        proxy.latency_s = 0.0
    recovered_s = _seconds_until_loaded(served, cases, name)
    calm_ms = dict.fromkeys(range(len(cases)), max(o.elapsed_ms for o in computed))
    rows.append(judge(name, hits, calm_ms, recovered_s))
    assert rows[-1].wrong == rows[-1].lost == 0, hits
    assert sum(hit.num_late + hit.num_declined for hit in hits) > 0, "they met the latency"
    limit_ms = MAX_P99_RATIO * max(outcome.elapsed_ms for outcome in computed)
    assert max(hit.elapsed_ms for hit in hits) <= limit_ms, "of so few, the 99th is the last"
    assert served.is_unharmed(), served.complaints()


def test_a_hit_is_no_slower_than_a_miss_at_any_bandwidth(
    served: Served, redis: RedisServer, cases: list[Case], proxy: Proxy, rows: list[Row]
) -> None:
    """Of hits, those count that come after the server had the chance to see how slow it is."""
    name = "payload reads throttled"
    _store(served, redis, cases, name)
    outcomes: list[Outcome] = []
    calm_ms = {o.case: o.elapsed_ms for o in _compute(served, cases, f"{name} calm")}
    loads: list[bool] = []
    try:
        for bytes_per_s in BANDWIDTHS:
            proxy.bytes_per_s = bytes_per_s
            lessons = [_hit(served, cases, name, number) for number in range(NUM_LESSONS)]
            hits, computed = _pairs(served, cases, name)
            outcomes += lessons + hits
            loads.append(any(hit.shared_bytes for hit in hits))
            assert _median_ms(hits) <= _limit_ms(computed), f"at {bytes_per_s} bytes a second"
    finally:
        proxy.bytes_per_s = None
        rows.append(judge(name, outcomes, calm_ms))
    assert loads[0], "a fast tier is used"
    assert not loads[-1], "a slow one is left alone"
    assert rows[-1].wrong == rows[-1].lost == 0, outcomes
    assert served.is_unharmed(), served.complaints()


def test_a_full_redis_refuses_writes_only(
    start_run: StartRun, served: Served, redis: RedisServer
) -> None:
    with start_run("Redis values out of memory", served) as run:
        run.warm()
        run.until(lambda: run.rise(STORES, tier="shared", result="stored") > 0, "nothing is stored")
        with run.fault():
            redis.cli("CONFIG", "SET", "maxmemory", str(_used_bytes(redis) + MIB))
            run.more(16)
            redis.cli("CONFIG", "SET", "maxmemory", "0")
        run.recover()
    assert run.rise(STORES, tier="shared", result="unavailable") > 0
    assert run.has_recovered_within(RECOVERY_S)


def _used_bytes(redis: RedisServer) -> int:
    lines = redis.cli("INFO", "memory").splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def _store(served: Served, redis: RedisServer, cases: list[Case], namespace: str) -> None:
    """Have every prompt's chunks in Redis, and Redis taken for fast enough."""
    chunks = {chunk for case in cases for chunk in case.text.split(DELIMITER)[:-1]}
    wait_until(lambda: metric_in(served.metrics(), READY, tier="shared") == 1, PATIENCE_S)
    for number, case in enumerate(cases):
        assert not served.attempt(number, case, pic_namespace=namespace).is_lost
    script = "return #redis.call('KEYS', 'pic1:{??}:n:*')"
    wait_until(lambda: int(redis.cli("EVAL", script, "0")) >= len(chunks), PATIENCE_S)
    _seconds_until_loaded(served, cases, namespace)


def _compute(served: Served, cases: list[Case], namespace: str) -> list[Outcome]:
    """Every prompt once with nothing cached, and nothing kept."""
    return [_miss(served, cases, f"{namespace} {n}", n) for n in range(len(cases))]


def _hit(served: Served, cases: list[Case], namespace: str, number: int) -> Outcome:
    """A prompt that the shared tier alone has."""
    served.client.flush()
    case = number % len(cases)
    return served.attempt(case, cases[case], pic_namespace=namespace)


def _miss(served: Served, cases: list[Case], namespace: str, number: int) -> Outcome:
    """A prompt that nobody has, and that is not kept."""
    case = number % len(cases)
    return served.attempt(case, cases[case], pic_namespace=namespace, pic_store="none")


def _pairs(
    served: Served, cases: list[Case], namespace: str
) -> tuple[list[Outcome], list[Outcome]]:
    """The same prompts as hits and as misses, in turn."""
    hits: list[Outcome] = []
    computed: list[Outcome] = []
    for number in range(NUM_PAIRS):
        hits.append(_hit(served, cases, namespace, number))
        computed.append(_miss(served, cases, f"{namespace} {number}", number))
    return hits, computed


def _stream(served: Served, cases: list[Case], namespaces: list[str]) -> list[Outcome]:
    """Prompts in these namespaces, several at a time."""
    served.client.flush()

    def ask(number: int) -> Outcome:
        case = number % len(cases)
        return served.attempt(case, cases[case], pic_namespace=namespaces[number])

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(ask, range(len(namespaces))))


def _seconds_until_loaded(served: Served, cases: list[Case], namespace: str) -> float:
    """How long it takes from now until chunks come from the shared tier."""
    started_s = time.monotonic()
    numbers = itertools.count()
    wait_until(lambda: _hit(served, cases, namespace, next(numbers)).shared_bytes > 0, REMEASURED_S)
    return time.monotonic() - started_s


def _median_ms(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.elapsed_ms for outcome in outcomes)


def _limit_ms(computed: list[Outcome]) -> float:
    """Most that a median hit may take: noise is twice the median's standard error."""
    noise_ms = 2 * statistics.stdev(o.elapsed_ms for o in computed) / len(computed) ** 0.5
    return MAX_MEDIAN_RATIO * _median_ms(computed) + noise_ms

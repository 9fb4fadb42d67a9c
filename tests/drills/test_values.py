"""Drills on payloads kept as Redis values, which come late, slowly, not at all, or find no room."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.drills.drill import (
    DELIMITER,
    NUM_THREADS,
    PATIENCE_S,
    STORES,
    UNAVAILABLE,
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

LATENCY_S = 0.2
MAX_P99_RATIO, MAX_MEDIAN_RATIO = 1.5, 1.05
NUM_BLOCKS, BLOCK_LEN = 4, 13
BANDWIDTHS = (100e6, 20e6, 4e6, 0.8e6)
"""Bytes a second, the fastest first: a tier found too slow is measured again after a minute."""

NUM_PAIRS = 8
NUM_LESSONS = 6
RECOVERY_S = 10.0
LEFT = "sglang_pic_left_segments_total"
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


def test_a_full_redis_refuses_writes_only(
    start_run: StartRun, served: Served, redis: RedisServer
) -> None:
    with start_run("Redis values out of memory", served) as run:
        run.warm()
        with run.fault():
            redis.cli("CONFIG", "SET", "maxmemory", str(_used_bytes(redis) + MIB))
            run.more(16)
            redis.cli("CONFIG", "SET", "maxmemory", "0")
        run.recover()
    assert run.rise(STORES, tier="shared", result="unavailable") > 0
    assert any(o.shared_bytes for o in run.outcomes if run.is_within_fault(o)), "reads go on"
    assert run.has_recovered_within(RECOVERY_S)


def _used_bytes(redis: RedisServer) -> int:
    lines = redis.cli("INFO", "memory").splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def test_a_stopped_store_costs_a_request_no_more_than_the_longest_stall(
    served: Served, redis: RedisServer, cases: list[Case], rows: list[Row]
) -> None:
    """One request at a time; noise is the most that equal requests differed by."""
    name = "Redis values stopped"
    _store(served, redis, cases, name)
    computed = [_attempt_alone(served, cases, f"{name} {turn}") for turn in range(2)]
    outcomes: list[Outcome] = []
    redis.pause()
    try:
        for number, case in enumerate(cases):
            served.client.flush()
            outcomes.append(served.attempt(number, case, pic_namespace=name))
    finally:
        redis.resume()
    recovered_s = _seconds_until_loaded(served, cases[0], name)
    computed.append(_attempt_alone(served, cases, f"{name} later"))
    times = [[outcome.elapsed_ms for outcome in same] for same in zip(*computed, strict=True)]
    noise_ms = max(max(same) - min(same) for same in times)
    rows.append(judge(name, outcomes, {n: max(t) for n, t in enumerate(times)}, recovered_s))
    assert rows[-1].wrong == rows[-1].lost == 0, outcomes
    assert any(outcome.num_late for outcome in outcomes), "a load was waited for"
    assert rows[-1].max_wait_ms <= STALL_MS + noise_ms
    assert recovered_s < RECOVERY_S
    assert served.is_unharmed(), served.complaints()


def test_late_payloads_do_not_hold_up_a_stream_of_hits(
    start_run: StartRun, served: Served, redis: RedisServer, cases: list[Case], proxy: Proxy
) -> None:
    """Streams with and without anything cached take turns; 2 % of the hits are none."""
    name = "payload reads 200 ms late"
    _store(served, redis, cases, f"{name} stream")
    before = served.metrics()
    proxy.latency_s = LATENCY_S
    try:
        hits: list[float] = []
        computed: list[float] = []
        for block in range(NUM_BLOCKS):
            namespaces = [f"{name} stream"] * BLOCK_LEN
            namespaces[0] = f"{name} new" if block == 0 else namespaces[0]
            hits += _stream(served, cases, namespaces)
            computed += _stream(served, cases, [f"{name} {block} {n}" for n in range(BLOCK_LEN)])
        num_left = _rise(served, before, LEFT)
        with start_run(name, served) as run:
            run.warm()
            with run.fault():
                run.more(12)
                proxy.latency_s = 0.0
            run.recover()
    finally:
        proxy.latency_s = 0.0
    assert num_left > 0, "payloads were declined, or late"
    assert max(hits) <= MAX_P99_RATIO * max(computed), "the 99th of 52 is the last"


def test_a_hit_is_no_slower_than_a_miss_at_any_bandwidth(
    served: Served, redis: RedisServer, cases: list[Case], proxy: Proxy, rows: list[Row]
) -> None:
    """Of hits, those count that come after the server had the chance to see how slow it is."""
    name = "payload reads throttled"
    _store(served, redis, cases, name)
    outcomes: list[Outcome] = []
    calm = {o.case: o.elapsed_ms for o in _attempt_alone(served, cases, f"{name} calm")}
    try:
        for bytes_per_s in BANDWIDTHS:
            proxy.bytes_per_s = bytes_per_s
            outcomes += _lessons(served, cases, name)
            hits, computed = _pairs(served, cases, name)
            noise_ms = 2 * statistics.stdev(computed) / len(computed) ** 0.5
            limit_ms = MAX_MEDIAN_RATIO * statistics.median(computed) + noise_ms
            assert statistics.median(hits) <= limit_ms, f"at {bytes_per_s / 1e6} MB/s"
    finally:
        proxy.bytes_per_s = None
        rows.append(judge(name, outcomes, calm))
    assert rows[-1].wrong == rows[-1].lost == 0, outcomes
    assert served.is_unharmed(), served.complaints()


def _store(served: Served, redis: RedisServer, cases: list[Case], namespace: str) -> None:
    """Have every prompt's chunks in Redis."""
    chunks = {chunk for case in cases for chunk in case.text.split(DELIMITER)[:-1]}
    before = served.metrics()
    for number, case in enumerate(cases):
        assert not served.attempt(number, case, pic_namespace=namespace).is_lost
    script = "return #redis.call('KEYS', 'pic1:{??}:n:*')"
    wait_until(lambda: int(redis.cli("EVAL", script, "0")) >= len(chunks), PATIENCE_S)
    assert _rise(served, before, UNAVAILABLE, tier="shared") == 0


def _attempt_alone(served: Served, cases: list[Case], namespace: str) -> list[Outcome]:
    """Every prompt once with nothing cached, and nothing kept."""
    return [
        served.attempt(n, case, pic_namespace=f"{namespace} {n}", pic_store="none")
        for n, case in enumerate(cases)
    ]


def _seconds_until_loaded(served: Served, case: Case, namespace: str) -> float:
    """How long it takes from now until a prompt's chunks come from the shared tier."""
    started_s = time.monotonic()

    def is_loaded() -> bool:
        served.client.flush()
        return served.attempt(0, case, pic_namespace=namespace).shared_bytes > 0

    wait_until(is_loaded, PATIENCE_S)
    return time.monotonic() - started_s


def _stream(served: Served, cases: list[Case], namespaces: list[str]) -> list[float]:
    """First-token times of prompts, several at a time; what was cached stays as it is."""
    served.client.flush()

    def ask(number: int) -> float:
        params = {"pic_namespace": namespaces[number], "pic_store": "none"}
        result = served.client.generate(cases[number % len(cases)].text, params)
        result.require_pic()
        return result.ttft_ms

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(ask, range(len(namespaces))))


def _lessons(served: Served, cases: list[Case], namespace: str) -> list[Outcome]:
    """Hits from which the server learns how fast the tier is."""
    outcomes: list[Outcome] = []
    for number in range(NUM_LESSONS):
        served.client.flush()
        case = number % len(cases)
        outcomes.append(served.attempt(case, cases[case], pic_namespace=namespace))
    return outcomes


def _pairs(served: Served, cases: list[Case], namespace: str) -> tuple[list[float], list[float]]:
    """First-token times of the same prompts, cached in the shared tier and not cached."""
    hits: list[float] = []
    computed: list[float] = []
    for number in range(NUM_PAIRS):
        text = cases[number % len(cases)].text
        served.client.flush()
        hit = {"pic_namespace": namespace, "pic_store": "none"}
        hits.append(served.client.generate(text, hit).ttft_ms)
        miss = {"pic_namespace": f"{namespace} {number}", "pic_store": "none"}
        computed.append(served.client.generate(text, miss).ttft_ms)
    return hits, computed


def _rise(served: Served, before: str, name: str, **labels: str) -> float:
    """How much a metric has grown since all metrics were read."""
    return metric_in(served.metrics(), name, **labels) - metric_in(before, name, **labels)

"""Who has which key: one server, or the masters of a cluster by slot.

Knows servers in use, their pools, and what a cluster says of itself. Does not know how connections
are opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.chunk_index.redis_commands import NUM_SLOTS, Command, slot_of
from sglang_ext.chunk_index.redis_connection import Address, ErrorReply, Reply
from sglang_ext.chunk_index.redis_pool import Pool
from sglang_ext.errors import IndexUnavailable


class Server:
    """A server in use: where it is, and a pool for each profile."""

    def __init__(self, address: Address, request_pool: Pool, background_pool: Pool) -> None:
        self.address = address
        self.request_pool = request_pool
        self.background_pool = background_pool

    def drop_idle(self) -> None:
        """Close what nobody uses now."""
        self.request_pool.drop_idle()
        self.background_pool.drop_idle()

    def close(self) -> None:
        """Close what nobody uses now, and everything else when it is returned."""
        self.request_pool.close()
        self.background_pool.close()


@dataclass(frozen=True, slots=True)
class Topology:
    """Which server has which slot; without slots the first has all."""

    servers: tuple[Server, ...] = ()
    slots: tuple[Server | None, ...] = ()

    def route(self, commands: Sequence[Command]) -> list[tuple[Server, list[int]]]:
        """For each server that is needed, the places of its commands.

        Always in the same order of servers: callers that hold a connection to one and wait for one
        to the next can never wait for each other.

        Raises:
            IndexUnavailable: Nobody has a slot.
        """
        if not self.slots and self.servers:
            return [(self.servers[0], list(range(len(commands))))]
        places: dict[Server, list[int]] = {}
        for place, command in enumerate(commands):
            server = self.slots[slot_of(command.key)] if self.slots else None
            if server is None:
                raise IndexUnavailable("no server of the cluster has the slot")
            places.setdefault(server, []).append(place)
        return [(server, places[server]) for server in self.servers if server in places]

    def route_to(self, place: int, commands: Sequence[Command]) -> list[tuple[Server, list[int]]]:
        """All commands to one server.

        Raises:
            IndexUnavailable: There are fewer servers by now.
        """
        if place >= len(self.servers):
            raise IndexUnavailable("Redis: moved: the cluster has fewer servers than before")
        return [(self.servers[place], list(range(len(commands))))]


def slot_ranges(answer: Reply) -> list[tuple[int, int, Address]]:
    """First slot, last slot and master of each range; the master's host may be empty."""
    ranges: list[tuple[int, int, Address]] = []
    for entry in answer if isinstance(answer, list) else []:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_]:
                if not 0 <= first <= last < NUM_SLOTS:
                    break
                ranges.append((first, last, Address((host or b"").decode(), port)))
            case _:
                break
    else:
        if ranges:
            return ranges
    raise ErrorReply("CLUSTERDOWN the server does not say who has which slot")

"""Quotas and the budget of a shared index: accounts of bytes, published and reserved.

Knows accounts and reservations. Does not know nodes: what is published is said by the shards, and
accounts follow it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.index import Reservation, Shortage
from sglang_ext.chunk_index.redis_calls import Calls
from sglang_ext.chunk_index.redis_commands import Command, Script, call_script
from sglang_ext.chunk_index.redis_connection import Argument, Reply
from sglang_ext.chunk_index.redis_replies import as_int, as_list, as_pairs, as_text
from sglang_ext.chunk_index.redis_scan import scan_pages
from sglang_ext.chunk_index.redis_scripts import Scripts
from sglang_ext.errors import IndexUnavailable

ALL: None = None
"""Stands among owners for the account of all."""

_AT_ONCE = 256  # accounts of one round trip


class Accounts:
    """Each owner's account, and the account of all, which is held to the budget."""

    def __init__(self, calls: Calls, scripts: Scripts, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self._calls = calls
        self._scripts = scripts

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        """Set bytes aside in both accounts, or in neither; one round trip if there is room."""
        reservation = Reservation(secrets.token_bytes(16), owner, num_bytes)
        budget = "" if self.budget_bytes is None else self.budget_bytes
        commands = [
            self._reserve(owner, owner, reservation, now_ms, ""),
            self._reserve(ALL, owner, reservation, now_ms, budget),
        ]
        missing: list[int] = []
        for reply in self._calls.attempt(commands):
            if isinstance(reply, IndexUnavailable):
                self.cancel(reservation)
                raise reply
            missing.append(as_int(reply))
        if max(missing) <= 0:
            return reservation
        self.cancel(reservation)
        is_own = missing[0] > 0
        return Shortage(missing[0] if is_own else missing[1], is_own)

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation's bytes back; if Redis is away, its end does that."""
        self.settle({reservation.owner: 0}, reservation)

    def settle(self, changes: Mapping[str, int], reservation: Reservation | None = None) -> None:
        """Change accounts by what was published or removed, and end a reservation.

        Never fails: what an account did not get is found when it is recounted.

        Args:
            changes: Bytes by owner, negative for bytes removed.
            reservation: Of the only owner in `changes`.
        """
        ended = b"" if reservation is None else _encode(reservation)
        commands = [self._settle(owner, owner, ended, num, 0) for owner, num in changes.items()]
        owner = next(iter(changes), "")
        commands.append(self._settle(ALL, owner, ended, sum(changes.values()), 0))
        with suppress(IndexUnavailable):  # counted by the link
            self._calls.attempt(commands)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota."""
        account, name = keys.account_key(owner), owner.encode()
        if num_bytes is None:
            commands = [
                Command(keys.QUOTAS, ("HDEL", keys.QUOTAS, name)),
                Command(account, ("HDEL", account, "quota")),
            ]
        else:
            commands = [
                Command(keys.QUOTAS, ("HSET", keys.QUOTAS, name, num_bytes)),
                Command(account, ("HSET", account, "quota", num_bytes)),
            ]
        self._calls.run(commands)

    def quotas(self) -> dict[str, int]:
        """Every owner that has a quota. Changes nothing."""
        pages = scan_pages(self._calls, "HSCAN", keys.QUOTAS)
        return {as_text(owner): as_int(quota) for page in pages for owner, quota in as_pairs(page)}

    def reconcile(self, published: Callable[[], Mapping[str, int]], now_ms: int) -> int:
        """Recount every account from what is published; returns how many were wrong.

        Modifies accounts; ends reservations whose time is up. What another process is about to
        settle looks wrong too, so only what is wrong twice in a row is corrected; if it was settled
        after all, the next time corrects that.

        Args:
            published: Asks for the bytes of every owner that has some.
            now_ms: Now.
        """
        self._correct(dict.fromkeys(self._excess(published()), 0), now_ms)
        first, second = self._excess(published()), self._excess(published())
        wrong = {
            owner: num_bytes
            for owner, num_bytes in second.items()
            if num_bytes != 0 and first.get(owner) == num_bytes
        }
        self._correct(wrong, now_ms)
        return len(wrong)

    def _excess(self, published: Mapping[str, int]) -> dict[str | None, int]:
        """What each account has beyond its reservations and what is published.

        Owners that have nothing any more are asked for the last time.
        """
        pages = scan_pages(self._calls, "SSCAN", keys.OWNERS)
        listed = {as_text(owner) for page in pages for owner in page}
        owners: list[str | None] = [*sorted(listed | published.keys()), ALL]
        commands = []
        for owner in owners:
            account, _ = _keys_of(owner)
            commands.append(Command(account, ("HMGET", account, "used", "reserved")))
        excess: dict[str | None, int] = {}
        for owner, reply in zip(owners, self._run(commands), strict=True):
            used, reserved = map(as_int, as_list(reply))
            num_bytes = sum(published.values()) if owner is None else published.get(owner, 0)
            excess[owner] = used - reserved - num_bytes
            if owner is not None and not used and owner not in published:
                self._calls.call("SREM", keys.OWNERS, owner.encode())
        return excess

    def _correct(self, excess: Mapping[str | None, int], now_ms: int) -> None:
        """Take bytes out of accounts, and end reservations whose time is up."""
        self._run(
            [
                self._settle(owner, owner or "", b"", -num_bytes, now_ms)
                for owner, num_bytes in excess.items()
            ]
        )

    def _run(self, commands: Sequence[Command]) -> list[Reply]:
        """Any number of commands, some at a time."""
        replies: list[Reply] = []
        for start in range(0, len(commands), _AT_ONCE):
            replies += self._calls.run(commands[start : start + _AT_ONCE])
        return replies

    def _reserve(
        self,
        account: str | None,
        owner: str,
        reservation: Reservation,
        now_ms: int,
        most: Argument,
    ) -> Command:
        ends_ms = now_ms + keys.RESERVATION_S * 1000
        arguments = (now_ms, _encode(reservation), ends_ms, most)
        return self._call(self._scripts.reserve, account, owner, arguments)

    def _settle(
        self, account: str | None, owner: str, ended: bytes, num_bytes: int, now_ms: int
    ) -> Command:
        return self._call(self._scripts.settle, account, owner, (now_ms, ended, num_bytes))

    def _call(
        self, script: Script, account: str | None, owner: str, arguments: tuple[Argument, ...]
    ) -> Command:
        listing = (keys.OWNERS,) if account is ALL else ()
        return call_script(script, (*_keys_of(account), *listing), (owner.encode(), *arguments))


def _keys_of(account: str | None) -> tuple[bytes, bytes]:
    if account is ALL:
        return keys.ALL_ACCOUNT, keys.ALL_RESERVATIONS
    return keys.account_key(account), keys.reservations_key(account)


def _encode(reservation: Reservation) -> bytes:
    return reservation.id + reservation.num_bytes.to_bytes(8, "little")

"""Changes of a shared index that others made, as they are announced.

Knows the form of an announcement. Does not know who keeps what of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_subscription import Subscription

SENDER_BYTES = 8

OnKeys: TypeAlias = Callable[[Sequence[ChunkKey]], None]


class RedisChanges:
    """Announcements of every index object but one; see `near_index.Changes`."""

    def __init__(self, link: RedisLink, sender: bytes) -> None:
        """Listen to nothing yet.

        Args:
            link: Opens the connection.
            sender: Whose announcements are left out: that index knows what it did.
        """
        self._link = link
        self._sender = sender
        self._subscriptions: list[Subscription] = []

    def subscribe(self, on_gone: OnKeys, on_new: OnKeys, on_lost: Callable[[], None]) -> None:
        """Tell of changes from now on, from a thread of its own.

        Args:
            on_gone: These keys left, or their records changed.
            on_new: These keys can be matched now.
            on_lost: Changes are heard from now on, and those before may have been missed: at the
                beginning, and after each interruption.
        """

        def on_message(message: bytes) -> None:
            listeners = {b"g": on_gone, b"n": on_new}
            listener = listeners.get(message[SENDER_BYTES : SENDER_BYTES + 1])
            body = message[SENDER_BYTES + 1 :]
            is_ours = message[:SENDER_BYTES] == self._sender
            if listener is None or not body or len(body) % KEY_BYTES or is_ours:
                return
            listener(
                [
                    ChunkKey(body[start : start + KEY_BYTES])
                    for start in range(0, len(body), KEY_BYTES)
                ]
            )

        self._subscriptions.append(Subscription(self._link, keys.CHANGES, on_message, on_lost))

    def close(self) -> None:
        """Tell nothing any more."""
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()

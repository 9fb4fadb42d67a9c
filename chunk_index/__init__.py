"""Which chunks are cached, and where: identity, the radix index, payload stores. No torch here."""

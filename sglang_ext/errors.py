"""Every exception this package raises on purpose.

    ExtError
    ├── ConfigError            a start-up option is wrong or contradicts another
    ├── UnsupportedSGLang      this SGLang version, model, backend or feature is not supported
    ├── RequestError           a `pic_*` key of a request is wrong (also a ValueError: HTTP 400)
    ├── ShapeError             an array has the wrong shape, dtype or device (also a ValueError)
    ├── IndexUnavailable       the chunk index cannot be reached; counts as a miss
    ├── PayloadLost            a cached payload is absent, damaged or another one; its entry must go
    ├── TierUnavailable        a payload tier cannot be reached or written; counts as a miss
    ├── PlanInfeasible         a plan cannot be carried out; the request is prefilled in full
    ├── SelfTestFailed         the start-up self-test does not hold on this model and backend
    └── ServerFailed           a server that a script started did not answer as it should

Imports nothing, so that every layer may use it.
"""


class ExtError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(ExtError):
    """A start-up option is wrong; the message names it, what was got and what is expected."""


class UnsupportedSGLang(ExtError):
    """This SGLang version, model, backend or feature is not supported; one line says which."""


class RequestError(ExtError, ValueError):
    """A request's `pic_*` key is wrong; the message names key, got and expected."""

    def __init__(self, key: str, got: object, expected: str) -> None:
        self.key = key
        self.got = got
        self.expected = expected
        super().__init__(f"{key}: got {got!r}, expected {expected}")


class ShapeError(ExtError, ValueError):
    """An array differs in shape, dtype or device; the message says name, expected, got."""


class IndexUnavailable(ExtError):
    """The chunk index cannot be reached; callers count a miss."""


class PayloadLost(ExtError):
    """A cached payload is absent, damaged or not what its record says; its entry must go.

    `reason` is one word for counters: `absent`, `truncated`, `damaged`, `forged`, `foreign`.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class TierUnavailable(ExtError):
    """A payload tier cannot be reached or written; callers count a miss and keep its entries."""


class PlanInfeasible(ExtError):
    """A plan cannot be carried out; the request is prefilled in full, with this reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class SelfTestFailed(ExtError):
    """The start-up self-test failed; PIC stays off."""


class ServerFailed(ExtError):
    """A server did not start, ended, or refused a request; the message says what it said."""

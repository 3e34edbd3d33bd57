"""What is raised, and what of it a program may want to know."""

from __future__ import annotations

import builtins


class Error(Exception):
    """What failed, why, and what to do, in one line; everything this package raises of its own.

    ``kind`` is a stable word: ``invalid``, ``format``, ``unavailable``, ``backend``, ``timeout``,
    ``rank``, ``busy``, ``system``, ``io``, ``output``, ``cancelled`` (a recorded sweep that was stopped before its
    first point). ``call`` is the C or system call that failed,
    ``code`` the backend's code or the errno, ``device`` and ``rank`` where it happened, ``advice`` what
    to do; ``None`` where that is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        call: str | None = None,
        code: int | None = None,
        device: int | None = None,
        rank: int | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.call = call
        self.code = code
        self.device = device
        self.rank = rank
        self.advice = advice


class InvalidError(Error, ValueError):
    """An argument cannot be used; the message begins with its name."""


class FormatError(Error, ValueError):
    """A file or a text holds something that cannot be read; the message begins with the place."""


class UnavailableError(Error):
    """A backend, device or rank that was asked for is not there."""


class BackendError(Error):
    """A call into a device backend failed."""


class RankError(Error):
    """The other rank is gone, or answered what it must not."""


class TimeoutError(Error, builtins.TimeoutError):
    """A device or the other rank did not act within ``timeout``."""


class BusyError(Error):
    """Somebody else writes this result folder, or is this rank."""


_CLASSES: dict[str, type[Error]] = {
    "invalid": InvalidError,
    "format": FormatError,
    "unavailable": UnavailableError,
    "backend": BackendError,
    "rank": RankError,
    "timeout": TimeoutError,
    "busy": BusyError,
}


def of_kind(
    kind: str,
    message: str,
    *,
    call: str | None,
    code: int | None,
    device: int | None,
    rank: int | None,
    advice: str | None,
) -> Error:
    """The exception for an error of the library."""
    make = _CLASSES.get(kind, Error)
    return make(
        message,
        kind=kind,
        call=call,
        code=code,
        device=device,
        rank=rank,
        advice=advice,
    )

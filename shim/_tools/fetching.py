"""Releases for commands that read or run others than the installed one."""

from __future__ import annotations

from pathlib import Path

from shim._errors import NotMetError
from shim._tools.output import tell

__all__ = ["fetched"]


def fetched(distribution: str, release: str) -> Path:
    """A release from the cache, else downloaded. A download is announced on standard error."""
    from shim.testing.releases import FetchError, fetch

    try:
        return fetch(release, distribution, tell)
    except FetchError as error:
        raise NotMetError(str(error)) from None

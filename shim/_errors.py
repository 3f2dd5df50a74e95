"""The errors shim raises; every message names the patch, the target, the release and the remedy."""

from __future__ import annotations

__all__ = ["BindError", "MatrixError", "NotMetError", "OptionError", "ShimError", "SourceError", "StandInError"]


class ShimError(Exception):
    """Base of every error of shim.

    Deliberately not an ImportError: megatron-core guards its imports with ``try: ... except ImportError``, and a
    patch that failed must not vanish in there.
    """


class OptionError(ShimError, ValueError):
    """An argument of a public function, or an environment variable, is not usable."""


class MatrixError(ShimError, ValueError):
    """version_matrix.yaml is not valid; the message starts with file and line."""


class SourceError(ShimError):
    """A source file cannot be located, read, parsed, or lacks the definition asked for.

    `cause` is "missing" (no such module or definition), "bytecode" (there is no source), "damaged" (it cannot be
    decoded or parsed), "unreadable" (the system refuses), or "changed" (it is there, but not as it was).
    """

    def __init__(self, message: str, cause: str = "unreadable") -> None:
        super().__init__(message)
        self.cause = cause


class NotMetError(ShimError):
    """Something that was required (``require``, ``strict``, ``on_drift="error"``) is not met."""


class StandInError(ShimError, RuntimeError):
    """Something was used that needs a package which is missing, and for which shim has put a stand-in."""


class BindError(ShimError):
    """A patch could not be bound, or did not read back; it was rolled back as a whole."""

    def __init__(self, message: str, patch: str | None = None) -> None:
        super().__init__(message)
        self.patch = patch

"""The errors that shim raises. A message names the patch, the target, the release and the remedy."""

from __future__ import annotations

from shim._printing.printable import one_line

__all__ = [
    "BindError",
    "MatrixError",
    "NotMetError",
    "OffloadError",
    "OptionError",
    "ShimError",
    "SourceError",
    "StandInError",
]

_LONG = 20_000  # characters; a message may name all patches


class ShimError(Exception):
    """Base of every error of shim.

    Deliberately not an ImportError: megatron-core guards its imports with ``try: ... except ImportError``, which would
    swallow the error of a failed patch. A message may quote what others have written, so it is made one printable line.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(arg, _LONG) if isinstance(arg, str) else arg for arg in args))


class OptionError(ShimError, ValueError):
    """An argument of a public function, or an environment variable, is not usable."""


class MatrixError(ShimError, ValueError):
    """version_matrix.yaml is not valid. The message starts with file and line."""


class SourceError(ShimError):
    """A source file cannot be located, read or parsed, or it lacks the definition that was asked for.

    `cause` is "missing" (no such module or definition), "bytecode" (there is no source), "damaged" (the file cannot be
    decoded or parsed), "unreadable" (the system refuses), or "changed" (the definition has another body).
    """

    def __init__(self, message: str, cause: str = "unreadable") -> None:
        super().__init__(message)
        self.cause = cause


class NotMetError(ShimError):
    """Something that was required (``require``, ``strict``, ``on_drift="error"``) is not met."""


class OffloadError(ShimError, RuntimeError):
    """Memory cannot be moved or put back by ``shim.offload``, or a call needs what it has moved."""


class StandInError(ShimError, RuntimeError):
    """Code used a stand-in that shim put in the place of a missing package."""


class BindError(ShimError):
    """A patch could not be bound, or its bindings did not read back. shim has rolled the whole patch back."""

    def __init__(self, message: str, patch: str | None = None) -> None:
        super().__init__(message)
        self.patch = patch

"""The one thing that mcore-bridge imports of it."""

from filelock import FileLock as FileLock

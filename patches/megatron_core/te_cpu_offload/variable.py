"""The variable that Transformer Engine reads while it is imported: option set_variable has shim set it just before.

It is restored when the last plan with the option ends, unless somebody else has changed it meanwhile.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType

from shim._resources import Resource

ID = "te-cpu-offload"
NAME, VALUE = "NVTE_CPU_OFFLOAD_V1", "1"
SETTING = f"{NAME}={VALUE}"
PACKAGE = "transformer_engine.pytorch"  # whose import reads it
WITHOUT = "a model with fine_grained_activation_offloading offloads its weights too"


@functools.cache
def _warn_late() -> None:
    logging.getLogger("shim").warning(
        f"{ID}: {PACKAGE} was imported before {SETTING} could be set: {WITHOUT}. Remedy: call shim.apply() earlier, or "
        f"start the process with {SETTING}."
    )


class Variable:
    """Each call of `bindings` with the option has a user of it. It needs no lock.

    `_set` looks for its user after it has written, and whoever removes the last user restores what was there.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._before: tuple[str | None] | None = None  # the value before; None if shim has set nothing

    def resource(self) -> Resource:
        read = sys.modules.get(f"{PACKAGE}.cpu_offload")
        if getattr(read, NAME, True) is False:  # before 2.10 there is no choice
            _warn_late()
        user = object()
        self._users.add(user)
        return Resource(self._told, functools.partial(self._leave, user), functools.partial(self._set, user))

    def _told(self) -> str:
        return f"{SETTING} in the environment" if self._before and os.environ.get(NAME) == VALUE else ""

    def _set(self, user: object, module: ModuleType) -> None:
        has_choice = os.path.exists(os.path.join(os.path.dirname(module.__file__ or ""), "cpu_offload_v1.py"))
        if has_choice and os.environ.get(NAME) != VALUE:
            self._before = (os.environ.get(NAME),)
            os.environ[NAME] = VALUE
        if user not in self._users:  # reverted meanwhile
            self._leave(user)

    def _leave(self, user: object) -> None:
        self._users.discard(user)
        if self._users or self._before is None:
            return
        if os.environ.get(NAME) == VALUE:
            (before,) = self._before
            if before is None:
                del os.environ[NAME]
            else:
                os.environ[NAME] = before
        self._before = None  # last: who is interrupted before has it done again

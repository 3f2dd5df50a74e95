"""A plan that does not fit the files this process runs is made anew, and takes the place of the old one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shim._engine.tied import Tie, made_anew
from shim._errors import NotMetError
from shim._releases.sources import Sources

if TYPE_CHECKING:
    from shim._engine.engine import Engine
    from shim._planning.plan import Plan

__all__ = ["Renewal"]


class Renewal:
    """Makes the plan in force anew when it is due, from sources that reuse what earlier plans have read.

    threads: those that make the plan anew. They do no late work meanwhile: the old plan would take upstream's functions
        of another copy for conflicts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tie = Tie()
        self.threads: set[int] = set()
        self._sources: Sources | None = None
        self._known: Callable[..., Any] | None = None

    def new_sources(self, known: Callable[..., Any] | None) -> Sources:
        """Sources for a new plan. They reuse what the last plan's Sources have read. `known`: see Sources."""
        self._known = known
        self._sources = self.tie.sources(self._sources, known)
        return self._sources

    def keep_tied(self, why_not: Callable[[Plan], str] | None = None) -> None:
        """Make the plan in force anew if `why_not` says that it does not fit this process. Called without the lock.

        NotMetError if the new plan does not meet the demands of the call that the plan was made for. The plan stays
        in force then, and so does what is bound.
        """
        engine = self._engine
        if engine.is_within():
            return  # whoever comes next asks again
        plan = engine.plan
        why = "" if plan is None else (why_not or self.tie.amiss)(plan)
        if plan is None or not why:
            return
        thread = threading.get_ident()
        self.threads.add(thread)
        try:
            engine.switch_to(self._made_anew(plan, why), instead=plan)
        except NotMetError as error:
            raise NotMetError(f"{why}. Until then: {error}") from error
        finally:
            self.threads.discard(thread)

    def is_renewed(self, plan: Plan) -> bool:
        """Whether the plan that a with-block restores did not fit this process any more, and has been made anew."""
        engine, why = self._engine, self.tie.amiss(plan)
        if why:
            fresh = self._made_anew(plan, why)
            with engine.lock:
                engine.contexts.open = engine.contexts.renewed(plan, fresh)
        return bool(why)

    def _made_anew(self, plan: Plan, why: str) -> Plan:
        self._engine.warn([f"{why}. The plan is made anew for it."])
        return made_anew(plan, self.new_sources(self._known))

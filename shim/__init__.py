"""shim: fixes and backports for every supported release of megatron-core and Transformer Engine.

    import shim
    shim.apply()            # as early as you can; after megatron was imported works too
    ...
    shim.check(model)       # after the model is built

A trainer imports this module in every process. So the public names are resolved on first use: importing shim costs
almost nothing, and imports neither torch nor megatron.
"""

from __future__ import annotations

import os

# Type checkers know this name. Importing typing would be most of the cost of importing shim.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shim._api import apply, check, check_resume, checkpoint_state, explain, patched, plan, revert, status
    from shim._compatible import compatible
    from shim._config_override import config_override
    from shim._engine.report import Report
    from shim._errors import BindError, MatrixError, NotMetError, OffloadError, OptionError, ShimError, StandInError
    from shim._offload import offload
    from shim._planning.plan import Plan
    from shim._version import __version__ as __version__
    from shim._workers.environment import ray_runtime_env, run_environment

__all__ = [
    "BindError",
    "MatrixError",
    "NotMetError",
    "OffloadError",
    "OptionError",
    "Plan",
    "Report",
    "ShimError",
    "StandInError",
    "apply",
    "check",
    "check_resume",
    "checkpoint_state",
    "compatible",
    "config_override",
    "explain",
    "offload",
    "patched",
    "plan",
    "ray_runtime_env",
    "revert",
    "run_environment",
    "status",
]

_HOMES = {  # the other names of __all__ are in shim._api
    **dict.fromkeys(
        ("BindError", "MatrixError", "NotMetError", "OffloadError", "OptionError", "ShimError", "StandInError"),
        "shim._errors",
    ),
    **dict.fromkeys(("ray_runtime_env", "run_environment"), "shim._workers.environment"),
    "compatible": "shim._compatible",
    "config_override": "shim._config_override",
    "offload": "shim._offload",
    "Plan": "shim._planning.plan",
    "Report": "shim._engine.report",
}

# In a source tree (on PYTHONPATH, as RL images have it) the patches lie beside this package, not inside it.
_top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_top, "version_matrix.yaml")) and os.path.isdir(os.path.join(_top, "patches")):
    __path__.append(_top)
del _top


def __getattr__(name: str) -> Any:
    home = "shim._version" if name == "__version__" else _HOMES.get(name, "shim._api")
    if name not in __all__ and name != "__version__":
        raise AttributeError(f"module 'shim' has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

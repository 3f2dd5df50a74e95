"""Groups of a layout are made for whatever torch passes to the constructor of a gloo group."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.distributed import distributed_c10d as c10d  # noqa: E402

from shim.testing import layout  # noqa: E402

TIMEOUT = datetime.timedelta(seconds=7)
Gloo: Any = c10d.ProcessGroupGloo


class Options:
    """The options of a torch that has one more of them: an unknown one is refused, as those of torch refuse it."""

    __slots__ = ("_devices", "_threads", "_timeout", "enable_reconfigure")

    def __init__(self) -> None:
        self._devices, self._threads, self._timeout, self.enable_reconfigure = [], 2, None, False


def made(*args: Any, options: Any = Options, **given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the constructor of a gloo group gets, where torch makes one inside a layout with these arguments."""
    got: list[Any] = []

    class OfTorch(Gloo):  # type: ignore[misc]
        _Options = options

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            got.append((args, kwargs))
            super().__init__(*args[:3], timeout=TIMEOUT)

    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(c10d, "ProcessGroupGloo", OfTorch))
        undo.enter_context(layout._one_device())
        group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, *args, **given)
    assert isinstance(group, Gloo)
    ((positional, named),) = got
    return positional[3:], named


def test_a_later_argument_reaches_the_group_and_the_device_is_shared():
    """torch 2.14 passes `enable_reconfigure`: it becomes an option of the group, as torch's own constructor has it."""
    (options,), named = made(timeout=TIMEOUT, enable_reconfigure=True)
    assert named == {}
    assert options.enable_reconfigure is True and options._timeout == TIMEOUT
    assert options._threads == 1 and len(options._devices) == 1
    (again,), _ = made(timeout=TIMEOUT, enable_reconfigure=False)
    assert again.enable_reconfigure is False and again._devices == options._devices


@pytest.mark.parametrize(
    ("args", "given", "options"),
    [
        pytest.param((), {"timeout": TIMEOUT, "not_known_yet": 1}, Options, id="an argument that is no option"),
        pytest.param((TIMEOUT,), {}, Options, id="by position"),
        pytest.param((), {"timeout": TIMEOUT}, type("Others", (), {"__slots__": ()}), id="options without devices"),
    ],
)
def test_what_options_cannot_say_goes_to_torch_as_it_came(args, given, options):
    """The group has a device of its own then. That is slower, and as right."""
    assert made(*args, options=options, **given) == (args, given)


def test_groups_of_this_torch_share_their_device():
    """The names that the sharing needs are those of the installed torch."""
    with layout._one_device():
        groups = [c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=TIMEOUT) for _ in range(2)]
    devices = [group.options._devices for group in groups]
    assert len(devices[0]) == 1 and devices[0] == devices[1]

"""What the ranks of test_check_on_ranks.py run: functions at the top level of a module, so that they can be pickled."""

import importlib
import os
import sys

import torch.distributed as dist

import shim

PACKAGES = ["fake_patches"]


def _check(group=None):
    try:
        return shim.check(group=group).digest
    except shim.ShimError as error:
        return f"{type(error).__name__}: {error}"


def start(root):
    """Make the fake tree at `root` importable."""
    sys.path = [root, *sys.path]
    os.environ["MEGATRON_SHIM_MATRIX"] = os.path.join(root, "matrix.yaml")


def with_excludes(*by_rank):
    rank = dist.get_rank()
    shim.apply(exclude=by_rank[rank], packages=PACKAGES)
    try:
        return _check()
    finally:
        shim.revert()


def with_modules(*by_rank):
    """As pipeline stages have it: the same plan, other modules imported."""
    shim.apply(packages=PACKAGES)
    for name in by_rank[dist.get_rank()]:
        importlib.import_module(name)
    try:
        return _check(), shim.status()["count"].state
    finally:
        shim.revert()


def without_apply(lazy):
    if dist.get_rank() != lazy:
        shim.apply(packages=PACKAGES)
    try:
        return _check()
    finally:
        shim.revert()


def in_subgroup(members, odd):
    """Only `odd` excludes a patch; every rank checks with the group of `members`."""
    group = dist.new_group(members)
    shim.apply(exclude=["count"] if dist.get_rank() == odd else [], packages=PACKAGES)
    try:
        return _check(group)
    finally:
        shim.revert()


def with_options(*by_rank):
    shim.apply(options={"more": by_rank[dist.get_rank()]}, packages=PACKAGES)
    try:
        return _check()
    finally:
        shim.revert()


def with_engine(odd):
    """On rank `odd` shim's engine has another hash."""

    from shim._planning import digest

    before = digest.own_code
    if dist.get_rank() == odd:
        digest.own_code = lambda digests: {**before(digests), "_engine": "0" * 16}
    try:
        shim.apply(packages=PACKAGES)
        return _check()
    finally:
        shim.revert()
        digest.own_code = before


def with_release(odd, root):
    """On rank `odd` the tree at `root` is installed instead."""
    path, modules = list(sys.path), dict(sys.modules)
    if dist.get_rank() == odd:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "fake_patches")]:
            del sys.modules[name]
        sys.path[:] = [root, *path]
    try:
        shim.apply(packages=PACKAGES)
        return _check()
    finally:
        shim.revert()
        sys.path[:] = path
        sys.modules.update(modules)

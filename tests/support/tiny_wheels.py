"""Wheels of one module, in the place of releases."""

import zipfile


def write_wheel(path, version, package="fake_core"):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", f"VERSION = {version!r}\n")

"""Build of megatron-shim, as far as pyproject.toml cannot say it.

The patches and the matrix lie beside the package in the tree, and inside it in the wheel. What lies in the tree and in
no package is named in MANIFEST.in, for the source distribution. With SOURCE_DATE_EPOCH, two builds of one tree have the
same bytes.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent


def said(file, pattern):
    """What the one line of the file with this pattern says."""
    return re.search(pattern, (HERE / file).read_text("utf-8"), re.M).group(1)


VERSION = said("shim/_version.py", r'^__version__ = "(.+)"$')
PROJECT = said("pyproject.toml", r'^Repository = "(.+)"$')


def readme():
    """README.md for a package index, where links relative to this tree would lead nowhere: absolute ones."""
    text = (HERE / "README.md").read_text("utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)]+)\)", rf"\1{PROJECT}/raw/main/\2)", text)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({PROJECT}/blob/main/\1)", text)


class BuildWithMatrix(build_py):
    """build_py, and into the package the matrix with its pins and its fast form."""

    def run(self):
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "shim"
            for name in ("version_matrix.yaml", "version_matrix.lock.json"):
                shutil.copyfile(HERE / name, package / name)
            fast_form = package / "_matrix" / "matrix.json"
            # Before what is there: an isolated build finds what it requires by it.
            path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
            command = [sys.executable, "-m", "shim._matrix", fast_form.absolute()]
            subprocess.run(command, cwd=HERE, env={**os.environ, "PYTHONPATH": path}, check=True)


class SameWheel(bdist_wheel):
    """bdist_wheel, whose archive says nothing of the umask."""

    def write_wheelfile(self, *arguments, **keywords):
        super().write_wheelfile(*arguments, **keywords)
        for file in Path(self.bdist_dir).rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)


class SameArchive(sdist):
    """sdist, whose archive says nothing of the day, the user and the umask."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        when = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or when is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(when), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", mtime=int(when), fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(Path(root_dir or ".") / base_dir, base_dir, filter=plain)  # in the order of names
        return name


# Guarded, because in a source tree this file is found beside the patches, and tools that walk packages import it.
if __name__ == "__main__":
    setup(
        version=VERSION,
        long_description=readme(),
        long_description_content_type="text/markdown",
        package_dir={"shim": "shim", "shim.patches": "patches"},
        packages=[
            "shim",
            *(f"shim.{package}" for package in find_packages(str(HERE / "shim"))),
            "shim.patches",
            *(f"shim.patches.{package}" for package in find_packages(str(HERE / "patches"))),
        ],
        cmdclass={"bdist_wheel": SameWheel, "build_py": BuildWithMatrix, "sdist": SameArchive},
    )

"""Build of megatron-shim: the patches and the matrix lie beside the package in the tree, and inside it in the wheel.

What lies in the tree and in no package is named in MANIFEST.in, for the source distribution.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "shim" / "_version.py").read_text("utf-8"), re.M).group(1)
# The address that the repository is to have. Before the first release somebody has to register it: docs/releasing.md.
PROJECT = "https://github.com/megatron-shim/megatron-shim"


def readme():
    """README.md for a package index, where links relative to this tree would lead nowhere: absolute ones, or none."""
    text = (HERE / "README.md").read_text("utf-8")
    if not PROJECT:
        return re.sub(r"!?\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)]+)\)", rf"\1{PROJECT}/raw/main/\2)", text)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({PROJECT}/blob/main/\1)", text)


def links():
    """What setup() is told of the project's pages."""
    if not PROJECT:
        return {}
    pages = {
        "Documentation": f"{PROJECT}/blob/main/docs/index.md",
        "Changelog": f"{PROJECT}/blob/main/CHANGELOG.md",
        "Issues": f"{PROJECT}/issues",
    }
    return {"url": PROJECT, "project_urls": pages}


class BuildWithMatrix(build_py):
    """build_py, and into the package the matrix with its pins and its fast form, and the changelog for `shim diff`."""

    def run(self):
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "shim"
            for name in ("version_matrix.yaml", "version_matrix.lock.json"):
                shutil.copyfile(HERE / name, package / name)
            shutil.copyfile(HERE / "CHANGELOG.md", package / "CHANGELOG.md")
            unwanted = shutil.ignore_patterns("README.md", "template.md")
            shutil.copytree(HERE / "changes", package / "changes", ignore=unwanted, dirs_exist_ok=True)
            fast_form = package / "_matrix" / "matrix.json"
            here = {**os.environ, "PYTHONPATH": str(HERE)}
            subprocess.run([sys.executable, "-m", "shim._matrix", fast_form.absolute()], cwd=HERE, env=here, check=True)


# Guarded, because in a source tree this file is found beside the patches, and tools that walk packages import it.
if __name__ == "__main__":
    setup(
        name="megatron-shim",
        version=VERSION,
        description="Fixes and backports for megatron-core and Transformer Engine releases, applied in memory",
        long_description=readme(),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        **links(),
        keywords=["megatron-core", "transformer-engine", "fine-tuning", "monkey-patch", "compatibility"],
        classifiers=[
            "Intended Audience :: Developers",
            "Operating System :: POSIX :: Linux",
            "Programming Language :: Python :: 3",
            *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
            "Topic :: Scientific/Engineering :: Artificial Intelligence",
        ],
        python_requires=">=3.10",
        package_dir={"shim": "shim", "shim.patches": "patches"},
        packages=[
            "shim",
            *(f"shim.{package}" for package in find_packages(str(HERE / "shim"))),
            "shim.patches",
            *(f"shim.patches.{package}" for package in find_packages(str(HERE / "patches"))),
        ],
        package_data={
            "shim": [
                "py.typed",
                "_releases/known_files.json",
                "_releases/known_trees.json",
                "_te/wanted_names.json",
                "_te/lost_names.json",
                "_te/te_remedies.json",
                "_workers/run/sitecustomize.py",
            ],
            "": ["patch.yaml"],
        },
        install_requires=["packaging>=23.2", "PyYAML>=6.0"],
        extras_require={
            "torch": ["torch>=2.6"],
            "megatron": ["megatron-core>=0.12"],
            "te": ["transformer-engine>=2.1"],
            "triton": ["triton"],
            "test": ["pytest", "pytest-xdist", "hypothesis"],
        },
        # Another package is called shim on the index, and installs a command of that name.
        entry_points={"console_scripts": ["shim = shim._tools.cli:main", "megatron-shim = shim._tools.cli:main"]},
        cmdclass={"build_py": BuildWithMatrix},
        zip_safe=False,
    )

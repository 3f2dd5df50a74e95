"""Build of megatron-shim: the patches and the matrix lie beside the package in the tree, and inside it in the wheel."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "shim" / "__init__.py").read_text("utf-8"), re.M).group(1)


class BuildWithMatrix(build_py):
    """build_py, and version_matrix.yaml into the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copyfile(HERE / "version_matrix.yaml", Path(self.build_lib) / "shim" / "version_matrix.yaml")


# Guarded, because in a source tree this file is found beside the patches, and tools that walk packages import it.
if __name__ == "__main__":
    setup(
        name="megatron-shim",
        version=VERSION,
        description="Fixes and backports for megatron-core and Transformer Engine releases, applied in memory",
        long_description=(HERE / "README.md").read_text("utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.10",
        package_dir={"shim": "shim", "shim.patches": "patches"},
        packages=[
            "shim",
            "shim.ops",
            "shim.testing",
            "shim.patches",
            "shim.patches.megatron_core",
            "shim.patches.transformer_engine",
        ],
        package_data={
            "shim": [
                "py.typed",
                "wanted_names.json",
                "lost_names.json",
                "te_remedies.json",
                "_run/sitecustomize.py",
            ]
        },
        install_requires=["packaging>=23.2", "PyYAML>=6.0"],
        extras_require={
            "torch": ["torch>=2.6"],
            "megatron": ["megatron-core>=0.12"],
            "te": ["transformer-engine>=2.1"],
            "triton": ["triton"],
            "test": ["pytest", "pytest-xdist", "hypothesis"],
        },
        entry_points={"console_scripts": ["shim = shim._cli:main"]},
        cmdclass={"build_py": BuildWithMatrix},
        zip_safe=False,
    )

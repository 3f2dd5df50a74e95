"""What gloo of an old torch cannot do."""

import re

import torch
from packaging.version import Version

LACKS = re.compile(r"(ProcessGroupGloo does not support|Backend gloo does not implement|Cannot use \S+ with Gloo).*")


def lacks(error):
    """Whether the text of an error says that this gloo lacks something. From torch 2.9 on it lacks nothing here."""
    return Version(torch.__version__).release < (2, 9) and LACKS.search(error) is not None

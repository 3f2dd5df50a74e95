"""In each rank of a trainer's command, before its first line: what lets it train on a CPU.

A launcher gives LOCAL_RANK to ranks alone. A rank gives it to the processes that read its data, which import the same.
"""

import os
import sys

if "LOCAL_RANK" in os.environ and not any("resource_tracker" in word for word in sys.orig_argv):
    import rank_on_cpu

    rank_on_cpu.enter() if "-c" not in sys.orig_argv else rank_on_cpu.importable()

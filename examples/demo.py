"""Fetches a release of megatron-core and runs packed_mtp.py on it, on CPU: `make demo RELEASE=0.16.1`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from shim import testing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="0.16.1", choices=testing.RELEASES, metavar="RELEASE")
    parser.add_argument("--steps", type=int, default=16, help="training steps (default 16)")
    options = parser.parse_args()
    try:
        directory = testing.fetch(options.release, progress=lambda line: print(f"{line} (kept for later)", flush=True))
    except testing.FetchError as error:
        print(error, file=sys.stderr)
        return 1
    # The release has to be on the path before Python starts; this process imports neither torch nor megatron.
    command = [sys.executable, str(Path(__file__).with_name("packed_mtp.py")), "--steps", str(options.steps)]
    return subprocess.run(command, env=testing.environment(directory)).returncode


if __name__ == "__main__":
    sys.exit(main())

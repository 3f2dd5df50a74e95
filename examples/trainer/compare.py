"""train.py three times: the truth, which is each sequence alone on one rank, then stock, then with shim.

    python compare.py losses.svg 2 --cp 2

The last two have 2 ranks here. Draws the losses, and ends with 0 only if those with shim are the truth's.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ALONE = ["--packing", "false", "--tp", "1", "--cp", "1", "--pp", "1", "--ep", "1"]
COLOURS = {"truth": "#57606a", "stock": "#cf222e", "shim": "#1a7f37"}


def losses(given: list[str], ranks: str, off: str) -> list[list[float]]:
    """Of each step, as train.py prints them; none if it ends with an error, as stock up to 0.15 does here."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks != "1" else []
    command = [sys.executable, *launcher, str(Path(__file__).with_name("train.py")), *given]
    done = subprocess.run(command, env=os.environ | {"MEGATRON_SHIM_DISABLE": off}, stdout=subprocess.PIPE, text=True)
    lines = [re.findall(r"\d+\.\d+", line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [] if done.returncode else [[float(loss) for loss in line] for line in lines]


def picture(runs: dict[str, list[list[float]]]) -> str:
    """SVG: by how much the last loss of each step is above or below the truth."""
    off = {run: [a[-1] - b[-1] for a, b in zip(steps, runs["truth"])] for run, steps in runs.items()}
    far = max(abs(value) for values in off.values() for value in values) or 1.0
    parts = [f'<text x="10" y="20">loss minus the truth, at most {far:.1e}</text>']
    for number, (run, values) in enumerate(off.items()):
        line = " ".join(f"{10 + 580 * i / len(values):.1f},{120 - 80 * v / far:.1f}" for i, v in enumerate(values))
        how = f'stroke="{COLOURS[run]}" stroke-width="{6 if run == "truth" else 2}" points="{line}"'
        parts.append(f'<text x="{450 + 50 * number}" y="20" fill="{COLOURS[run]}">{run}</text>')
        parts.append(f'<polyline fill="none" {how}/>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 220" font-family="sans-serif" font-size="13">'
    return f'{head}<rect width="600" height="220" fill="#fff"/>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    file, ranks, *given = sys.argv[1:]
    runs = {"truth": losses([*given, *ALONE], "1", "1"), "stock": losses(given, ranks, "1")}
    runs["shim"] = losses(given, ranks, "")
    Path(file).write_text(picture({run: steps for run, steps in runs.items() if steps}))
    for run, steps in runs.items():
        pairs = [pair for step, right in zip(steps, runs["truth"]) for pair in zip(step, right, strict=True)]
        worst = max((abs(a / b - 1) for a, b in pairs), default=1.0)
        print(f"{run}: " + (f"off by {worst:.0e}" if steps else "cannot run"))
    sys.exit(worst > 1e-5)  # the rounding of a step goes into the weights of the next

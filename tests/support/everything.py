"""What `make test` runs, target by target; at the end where the minutes went, and what was skipped for want of sources.

A target that fails does not stop the next: one run shows every failure.

build/durations.txt keeps the table, with every file of tests, and build/tests.jsonl what recording.py has written.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from recording import NO_SOURCES

TOP = Path(__file__).resolve().parents[2]

# Types are checked, and environments for the other Pythons made, by one process each: side by side, and beside tests.
STEPS = (("lint", "unit-pythons", "unit"), ("helpers", "other-torch"), ("cells",), ("pairs",), ("trainers",))
RECORD, TABLE = TOP / "build/tests.jsonl", TOP / "build/durations.txt"
SHOWN = 15  # files on the screen


def run(targets, spent, skipped):
    """Run targets side by side, and note (CPU seconds, seconds) of each and its lines that begin with `skipped: `."""
    failed, started, running, readers = [], time.monotonic(), {}, []

    def pass_on(output):
        said = b""
        while part := os.read(output.fileno(), 65536):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            said += part
        lines = said.decode(errors="replace").splitlines()
        skipped.extend(line.removeprefix("skipped: ") for line in lines if line.startswith("skipped: "))

    for target in targets:
        environ = {**os.environ, "SHIM_TEST_RECORD": str(RECORD), "SHIM_TEST_TARGET": target}
        command = ["make", "--no-print-directory", target]
        process = subprocess.Popen(command, cwd=TOP, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        running[process.pid] = target, process
        readers.append(threading.Thread(target=pass_on, args=(process.stdout,)))
        readers[-1].start()
    while running:
        pid, status, usage = os.wait4(-1, 0)
        target, process = running.pop(pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        spent[target] = usage.ru_utime + usage.ru_stime, time.monotonic() - started
        failed += [target] if process.returncode else []
    for reader in readers:
        reader.join()
    return failed


def table(spent, records):
    """Lines: the seconds of each target, then those of each file of tests, the dearest first."""
    cpu, tests = Counter(), Counter()
    for record in records:
        if "file" in record:
            cpu[record["target"], record["file"]] += record["cpu"]
            tests[record["target"], record["file"]] += record["tests"]
    lines = ["CPU seconds  minutes  target"]
    lines += [f"{used:11.0f}  {wall / 60:7.1f}  {target}" for target, (used, wall) in spent.items()]
    used = sum(used for used, _ in spent.values())
    lines += [f"{used:11.0f}           all, {used / 60:.0f} minutes of one core", "", "CPU seconds    tests  file"]
    return lines + [f"{used:11.1f}  {tests[key]:7d}  {key[0]}: {key[1]}" for key, used in cpu.most_common()]


def missing(records, skipped):
    """One line: what was skipped for want of sources."""
    reasons = Counter(r["reason"].removeprefix(NO_SOURCES).partition(":")[0] for r in records if "reason" in r)
    said = [f"{count} tests of {what}" for what, count in reasons.most_common()] + list(dict.fromkeys(skipped))
    return f"Skipped for want of sources: {'; '.join(said) or 'nothing'}."


def main():
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("")
    spent, skipped, failed = {}, [], []
    for targets in STEPS:
        failed += run(targets, spent, skipped)
    records = [json.loads(line) for line in RECORD.read_text().splitlines()]
    lines = table(spent, records)
    TABLE.write_text("\n".join(lines) + "\n")
    shown = lines[: len(spent) + 4 + SHOWN]
    print("", *shown, f"All files are in {TABLE.relative_to(TOP)}.", sep="\n")
    print(missing(records, skipped))
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

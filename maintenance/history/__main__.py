"""`make history`: what is new on upstream's branches, and what proofs say of it. For developers of shim.

    SHIM_MEGATRON_GIT=CLONE make history [COMMITS=20]

Walks every commit of main, dev and the release branches by git, without a work tree, and lists the sets of bodies that
no release has. Then the proofs run on few commits that have all of them, one after the other. It stops after COMMITS of
them; the same command goes on from there. What they show goes into shim/_releases/known_trees.json, which ships.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shim._archives.git_commits import Git
from shim._errors import OptionError
from shim._matrix.load import load_matrix
from shim._planning.evidence import CANNOT_RUN
from shim._releases.known_files import TREES, KnownFiles, known_trees
from shim.testing.releases import cache_dir
from shim.testing.repositories import REPOSITORIES

from ..known_trees import is_stale, render_trees, with_files, with_tree, without_failures
from ..pin import replace_file
from .cover import Chosen, Unknown, chosen
from .proofs import prove
from .state import State
from .walk import BRANCHES, Found, Walk, commits_of, heads_of


def main(argv: Sequence[str] | None = None) -> int:
    """Walk, prove, and write the evidence and the record."""
    parser = argparse.ArgumentParser(prog="make history", description=__doc__)
    parser.add_argument("--distribution", choices=list(BRANCHES), default="megatron-core")
    parser.add_argument("--commits", type=int, default=0, help="run the proofs on so many commits (default: none)")
    parser.add_argument("--since", default="2026", metavar="DAY", help="commits since then come first (default 2026)")
    parser.add_argument("--again", action="store_true", help="also try sets that no proof could judge, or no patch fix")
    parser.add_argument("--table", action="store_true", help="print the number of sets of each patch")
    options = parser.parse_args(argv)
    name = options.distribution
    repository = _clone(name)
    state = State(name)
    if options.again:
        state.unjudged, state.broken = {}, {}
        of_history = [tree for tree, said in known_trees()["trees"].items() if "day" in said]
        _write(lambda table: {**table, "patches": without_failures(table["patches"], of_history)})
    unknown, files = _walked(name, repository, state, options.table)
    _write(lambda table: {**table, "files": with_files(table["files"], files)})
    state.write()
    if options.commits:
        _prove(name, repository, unknown, state, options.commits, options.since)
    return 0


def _clone(distribution: str) -> Path:
    variable = REPOSITORIES[distribution].variable
    if not os.environ.get(variable):
        raise OptionError(f"{variable} names no clone. Remedy: git clone --bare {REPOSITORIES[distribution].url}")
    directory = Path(os.environ[variable]).expanduser()
    return directory / ".git" if (directory / ".git").exists() else directory


def _write(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the evidence that ships, and leave out of it what is about other names than patches bind or read today."""
    entries, before = load_matrix().patches, known_trees()
    patches = {
        id: left
        for id, said in before["patches"].items()
        if (left := [each for each in said if not is_stale(entries.get(id), each)])
    }
    replace_file(TREES, render_trees(change({**before, "patches": patches})).encode())
    known_trees.cache_clear()


def _walked(distribution: str, repository: Path, state: State, table: bool) -> tuple[Unknown, KnownFiles]:
    """Every commit with its bodies that no release has, and all files. Prints what is new, and what is left."""
    git = Git(repository)
    walk = Walk(git, distribution, load_matrix(), cache_dir() / "history" / f"{distribution}.jsonl")
    commits = commits_of(git, distribution, heads_of(git, distribution).values())
    blobs = {commit: walk.blobs(commit.hash) for commit in commits}
    every = [(blob, module) for having in blobs.values() for module, blob in having.items()]
    walk.measure(every)
    unknown = {c: [f for f in walk.on(having) if f.has_targets and not f.is_released] for c, having in blobs.items()}
    seen: dict[str, dict[str, Found]] = {}
    new = []
    for commit, found in unknown.items():
        for each in found:
            seen.setdefault(each.entry.id, {})[each.digest] = each
            if state.see(commit, each):
                new.append(f"{each.entry.id}: {state.sets[each.entry.id][each.digest]}")
    state.forget_others({id: set(digests) for id, digests in seen.items()})
    total = len({(each.entry.id, each.digest) for having in blobs.values() for each in walk.on(having)})
    unseen = sum(map(len, seen.values()))
    others = f"{unseen} of them of no release"
    print(f"{len(commits)} commits, {total} sets of bodies, {others}; {len(new)} are new")
    if len(new) <= 40:
        print("".join(f"  {line}\n" for line in new), end="")
    usable = {(f.entry.id, f.digest) for c, found in unknown.items() if c.short not in state.broken for f in found}
    open_ = {id: [each for each in digests.values() if not state.judged(each)] for id, digests in seen.items()}
    left = {id: [each for each in those if (id, each.digest) in usable] for id, those in open_.items()}
    to_prove = sum(map(len, left.values()))
    print(f"  {to_prove} to prove; no proof can judge {sum(map(len, state.unjudged.values()))}", end="")
    print(f", and {sum(map(len, open_.values())) - to_prove} are only on commits that cannot be imported")
    if table:
        for id in sorted(seen, key=lambda id: -len(seen[id])):
            print(f"  {id}: {len(seen[id])} sets, {len(left[id])} to prove")
    return unknown, walk.files(every)


def _prove(distribution: str, repository: Path, unknown: Unknown, state: State, count: int, since: str) -> None:
    usable = {commit: found for commit, found in unknown.items() if commit.short not in state.broken}
    for number, choice in enumerate(chosen(usable, state.judged, lambda commit: commit.date >= since)):
        if number == count:
            return
        ids = sorted(found.entry.id for found in choice.new)
        print(f"{choice.commit.short} of {choice.commit.date}: {len(ids)} patches", flush=True)
        told = prove(repository, distribution, choice.commit, ids, cache_dir() / "history")
        _record(distribution, choice, told, state)
        state.write()


def _record(distribution: str, choice: Chosen, told: dict[str, Any], state: State) -> None:
    """Enter what the proofs of a commit have shown, or that they could not run."""
    commit = choice.commit
    if "error" in told:
        state.broken[commit.short] = told["error"]
        print(f"  {told['error']}")
        return
    judged = told["proved"]["patches"]
    told["proved"]["files"] = {}  # the walk has them
    about = {"of": commit.number, "day": commit.date}
    _write(lambda table: with_tree(table, commit.short, about, told, load_matrix().patches))
    for found in choice.new:
        said = judged.get(found.entry.id, {"verdict": CANNOT_RUN, "shown": "a release has its bodies"})
        if not state.judged(found):
            state.unjudged.setdefault(found.entry.id, {})[found.digest] = f"{commit.short}: {said['shown']}"[:200]
        print(f"  {found.entry.id}: {said['verdict']} {said.get('variant') or ''} {said['shown'][:80]}")
    state.runs[commit.short] = [len(choice.new), told["seconds"]]
    print(f"  {told['seconds']} CPU seconds", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OptionError as error:
        sys.exit(f"{error}")

"""Reference pages generated from the code: the commands with their options, the states, and the keys of the matrix."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from shim._engine.report import STATES
from shim._matrix import declared, reader, rules
from shim._matrix.concerns import WORDS
from shim._matrix.model import CHANGES, DISTRIBUTIONS, KINDS, SYMPTOMS
from shim._tools.arguments import add_selection, command_line

__all__ = ["KEYS", "MEANINGS", "TABLES", "commands", "matrix_page", "states_page"]


def commands() -> str:
    """The commands, then the options that several commands share, then the options of single commands."""
    subs, bare = subparsers(command_line()), argparse.ArgumentParser()
    add_selection(bare)
    shared = _flags(bare)
    lines = ["| command | what it does |", "|---|---|"]
    lines += [
        f"| `shim {name}{_positionals(sub)}` | {_sentence(sub.description or '')} |" for name, sub in subs.items()
    ]
    taking = [name for name, sub in subs.items() if set(shared) <= set(_flags(sub))]
    named = ", ".join(f"`{name}`" for name in taking)
    lines += ["", f"Options that choose patches, of {named}:", "", *_rows(shared.values())]
    lines += ["", "Options of single commands:", "", "| command | option | what it says |", "|---|---|---|"]
    for name, sub in subs.items():
        for flag, action in _flags(sub).items():
            if flag != "--json" and not (name in taking and flag in shared):
                lines.append(f"| `{name}` | {_spelling(action)} | {_sentence(action.help or '')} |")
    return "\n".join(lines)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(actions).choices)


def _flags(sub: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {a.option_strings[-1]: a for a in sub._actions if a.option_strings and a.dest != "help"}


def _positionals(sub: argparse.ArgumentParser) -> str:
    names = (action.metavar or action.dest.upper() for action in sub._actions if not action.option_strings)
    return "".join(f" {name}" for name in names)


def _spelling(action: argparse.Action) -> str:
    """An option with its value, as people type it."""
    value = action.metavar or action.dest.upper()
    if isinstance(value, tuple):  # one value, and more that may follow
        value = " ".join([value[0], *(f"[{more}]" for more in value[1:])])
    what = f" {{{','.join(map(str, action.choices))}}}" if action.choices else f" {value}"
    return ", ".join(f"`{flag}{'' if action.nargs == 0 else what}`" for flag in action.option_strings)


def _rows(actions: Iterable[argparse.Action]) -> Iterator[str]:
    yield from ("| option | what it says |", "|---|---|")
    for action in actions:
        yield f"| {_spelling(action)} | {_sentence(action.help or '')} |"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".").replace("|", "\\|") + "."


# What each state means, and what a reader can do about it. tests/unit/test_docs.py compares the names with STATES.
MEANINGS = {
    "applied": ("The patch is in force. shim has just read every binding back from the process.", ""),
    "upstream": (
        "The release has fixed the defect: all bodies that the patch binds or relies on are those of a release that is "
        "right, or proofs have shown it. The version alone is never enough.",
        "",
    ),
    "not-needed": ("The release never had the defect, for instance because it lacks the feature. Seen as above.", ""),
    "not-installed": ("The distribution of the patch is not installed.", ""),
    "out-of-range": ("No rule of the matrix covers this release.", ""),
    "excluded": ("You left the patch out, by an argument or a variable.", ""),
    "not-concerned": (
        "The patch concerns nothing that `concerns=` names.",
        "Nothing, unless `check(model)` says that the model needs the patch: then add the word that it names.",
    ),
    "inactive": (
        "The patch is bound, but has no effect on the model that `check(model)` was given.",
        "The reason names the flag or the option that switches it on.",
    ),
    "pending": (
        "The patch waits for the import of a module that it patches.",
        "Nothing, unless the trainer has imported everything: then exclude the patch.",
    ),
    "idle": ("The patch waits for the import of a module that is optional in this process.", ""),
    "unknown": (
        "shim cannot tell whether the patch has its effect: the code does not show whether a foreign object calls "
        "shim's function, or `check(model)` has tried an override without a result.",
        "The reason names the object, and the remedy the next step. Test the object, and mark it with "
        "`shim.compatible` if it is right.",
    ),
    "drifted": (
        "A body that the patch binds or relies on cannot be read, or is not known: whether this tree needs the patch "
        "is not known.",
        "Let the proofs decide (`shim pin --prove`), update megatron-shim, or report it with what `shim audit` prints. "
        '`on_drift="apply"` applies the patch if the signature still fits.',
    ),
    "conflict": (
        "A foreign object replaces a target that the patch needs, and does not call it; or it replaces a function on "
        "the way to a target and does not lead there; or `check(model)` has tried it, and it keeps the patch from its "
        "effect.",
        "Remove that object (the patch replaces it), or keep it and exclude the patch. The remedy names it.",
    ),
    "shadowed": (
        "A subclass or an instance in the model overrides a method, and keeps the patch from its effect.",
        "Call the method of the base class in the override, or drop the override.",
    ),
    "failed": (
        "Binding raised an error. shim has rolled the whole patch back.",
        "Report it with the output of `shim doctor`, and exclude the patch meanwhile.",
    ),
}

STATES_HEAD = """\
# States

Generated by `make docs`.

A plan decides about each patch, and a report describes each patch in the running process. Each gives every patch one
state and one reason. If a plan says `apply`, a report later says `applied`, `pending`, `idle`, `unknown`, `inactive`,
`shadowed` or `failed`.

| state | meaning | what to do |
|---|---|---|
"""

STATES_TAIL = """
`shim.status()` reads the state from the process at the moment of the call. `shim.check(model)` also looks at the
modules of the model. While that model lives, `shim.status()` looks at it again, so that both say the same.

## Overrides

A subclass, or a function bound to an instance, may override a method that shim patches, or one through which models
reach a patched function. `shim.check(model)` decides about the patch:

1. The override calls the patched method, by `super()`, by the class, or as a wrapper; or its code leads to the patched
   function. The patch is `applied`.
2. A trainer has marked the override with `shim.compatible`. The patch is `applied`. shim does not try the override.
3. shim tries the override on a tiny input: a packed row of ten tokens, or a layer of one weight. That takes
   milliseconds, touches neither weights nor random state, and sends nothing to other ranks. The patch is `applied` if
   the override keeps the effect of the patch, and `shadowed` if not.
4. If the patch cannot try the method, or the trial raises an error, the patch is `unknown`. That is a warning and never
   an error, also under `require` and `strict`.

`report[id].others` names every override of 1 to 3 with its file and line. A method that the model's own config never
runs hides nothing.

A trainer may also assign another function to the class, or to a module. shim tries that function in the same way, if
the patch can try what it replaces; one of a module needs no model. Until `shim.check(model)` has done so, the patch is
`unknown`. After that it is `applied` if the function keeps the effect of the patch, and a `conflict` if not. The other
targets of the patch stay bound.

So call `shim.check` once the model is complete, with its adapters and frozen weights.

```python
@shim.compatible("megatron.core.models.gpt.gpt_model:GPTModel._postprocess", version="0.1.0")
def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, **kwargs):
    ...
```

`version` is the version of shim that the override was tested with. The default is the running version.

## Errors

A correctness patch that cannot be applied is a WARNING of the logger `shim`, with the reason and the remedy.

Under `require=[...]` and `strict=True` the states `drifted` and `conflict` are errors: `shim.apply()` raises
NotMetError and applies nothing. The command line exits with 1, see [cli.md](cli.md#exit-codes).

An exception that ends a program or a thread has a note below its traceback if it has passed through code of a patch.
The note names the patches, the innermost first, and MEGATRON_SHIM_EXCLUDE for them. Before Python 3.11 it is a message
of the logger `shim`. `shim.apply()` installs sys.excepthook and threading.excepthook for it, and `shim.revert()` gives
both back. Functions of patches do nothing for it, so a call costs nothing.

There is no note if somebody catches the exception and prints the traceback, as Ray and multiprocessing do in their
workers, and logging. The traceback itself names the patch: a file in `shim/patches/megatron_core/label_smoothing/`
belongs to `label-smoothing`. Code that torch.compile has compiled leaves no frame of the patch.
"""


def states_page() -> str:
    """The text of docs/states.md."""
    rows = [f"| {state} | {MEANINGS[state][0]} | {MEANINGS[state][1] or 'Nothing.'} |" for state in STATES]
    return STATES_HEAD + "\n".join(rows) + "\n" + STATES_TAIL


# What each key of the matrix says, by the table of keys in the code.
KEYS = {
    "The file": {
        "supported": "The supported releases of each distribution, oldest first.",
        "commits": "Source states that are no release, by distribution and name: the first ten digits of the commit.",
        "patches": "The patches by id. Of patches on one target, the later one wraps the earlier one.",
    },
    "A commit": {
        "commit": "All forty digits, quoted.",
        "version": "The version of the sources, quoted; a pre-release if they come before the release.",
        "date": "The day of the commit, quoted. Commits stand in the order of their days.",
        "of": "The branch or the tag; after a comma, the projects that pin the commit.",
    },
    "A patch": {
        "summary": "Fixes or Adds, the symptom first, in one line.",
        "without": "The defect of a release that needs the patch and does not get it, in one line.",
        "kind": f"One of {', '.join(KINDS)}.",
        "changes": f"The effect of the patch on the numbers of a run: {', '.join(CHANGES)}.",
        "effects": f"For a patch with several effects: `{{kind: what}}` for each of {', '.join(CHANGES[1:])}. "
        "`changes` is the strongest of them. `shim plan` and `shim explain` print them.",
        "symptom": f"What goes wrong without the patch, the worst of it: {', '.join(SYMPTOMS)}. `silent`: numbers are "
        "wrong, and nothing says so. `crash`, `hang`: the run ends or stands still. `memory`: it takes more memory or "
        "time than it needs. `missing`: the release lacks a feature.",
        "concerns": "The models and runs that the patch concerns. Each entry is words that hold together, with `+` "
        "between them, such as `mtp+packed`; the entries are alternatives. The words are in the last table.",
        "per_model": "Inputs of the patch: `own`, from the module's config or the call; `process`, from the process.",
        "outside_of": "The patches that this one wraps: it binds the same target and stands later. `{id: why}`.",
        "cost": "What the fix takes beyond stock: operations, messages, bytes. Without it: nothing.",
        "distribution": "The distribution whose releases decide about the variant.",
        "targets": "The targets that variants inherit: a variant without this key has all of them, and one that only "
        "names a target has the keys that it has here.",
        "reads": "The same for `reads`.",
        "variants": "The variants by name.",
        "references": "Pull requests and issues upstream.",
        "met_by": "Projects that met or work around the defect: `NAME issue N`, `NAME pull request N`, or words.",
        "delete_when": "The event that makes the patch unnecessary, if the header of its module does not name it.",
        "options": "The options by name.",
        "before": "Modules before whose code the patch acts: its `Resource.begin`. It is loaded then at the latest.",
        "decided": "Decisions of people about bodies of new releases.",
        "pairs": "Defects of two releases together, with a `note`. `shim plan` names them. They decide no variant.",
        "probe": "The targets in whose place the module's `probe` tries a foreign function, methods in a model.",
        "module": "The module with `bindings()`, such as `trainer_patches.roll_fix`.",
        "applies": "Rules with a key `variant` more, for patches whose rules do not stand in their variants.",
        "upstream": "Rules for releases that have fixed the defect. Their `note` says how.",
        "not_needed": "Rules for releases that never had the defect, or lack the feature. Their `note` says why.",
    },
    "A variant": {
        "applies": "A rule, or a list of rules: the releases that get this variant.",
        "targets": "The names that the variant binds: a list of `module:Class.name`, or `{module: [Class.name, ...]}`. "
        "A name may be a mapping with the keys below. A module that begins with a dot is one of megatron.core, or of "
        "transformer_engine, by the distribution of the patch.",
        "reads": "The names that the variant relies on, in the same form. shim checks their bodies as well.",
    },
    "A rule": {
        **{name: f"A range of {name} releases, quoted." for name in DISTRIBUTIONS},
        "note": "Why, in one line.",
    },
    "A target": {
        "target": "The name.",
        "inherits": "The definition that the class inherits under this name. Its body counts.",
        "optional": "`true`: a process may do without the module of this target, so the patch does not wait for it.",
        "added": "`true`: the release may lack the name. The factory then gets MISSING.",
        "alone": "`true`: shim does not bind aliases of this target.",
        "wraps": "`true`: the factory holds around any function that takes the same calls, also a foreign one.",
        "without": "The remaining defect without this one target. A foreign object there costs no more than that.",
        "reached_by": "The functions and methods through which a call reaches it. A foreign function there, or an "
        "override of the method, may hide the patch.",
    },
    "A read": {
        "read": "The name.",
        "reached_by": "As of a target.",
    },
    "A decision": {
        "target": "The target or read that was read.",
        "body": "The fingerprint that it had. The decision is about no other body.",
        "as": "The variant, `upstream` or `not-needed` that a release with this body gets.",
        "note": "The change in the body, and why it does not concern the patch.",
    },
    "An option": {
        "default": "The value without an argument. An option that is not a mapping is its default.",
        "type": f"One of {', '.join(declared.TYPES)}. Required if the default is null.",
        "choices": "For text: the values that are allowed.",
        "minimum": "For numbers: the smallest value.",
        "maximum": "For numbers: the largest value.",
        "above": "For numbers: a value that must be exceeded.",
        "switch": "`true`: the patch does nothing until a switch of it is true. The default is false.",
    },
}
TABLES = {
    "The file": rules.TOP_KEYS,
    "A commit": reader.COMMIT_KEYS,
    "A patch": rules.PATCH_KEYS,
    "A variant": rules.VARIANT_KEYS,
    "A rule": rules.RULE_KEYS,
    "A target": rules.TARGET_KEYS,
    "A read": rules.READ_KEYS,
    "A decision": reader.DECIDED_KEYS,
    "An option": reader.OPTION_KEYS,
}

MATRIX_HEAD = """\
# The matrix

Generated by `make docs` from the tables of keys in shim/_matrix/.

version_matrix.yaml says which release gets which variant of which patch:

```yaml
patches:
  roll-fix:
    v0_16: ">=0.16,<0.18"
    upstream: {megatron-core: ">=0.18,<0.19", note: fixed in 0.18}
```

A range alone is over the distribution that the patch is of. `upstream`, `not_needed` and each variant take one rule or
a list of rules.

What a patch is stands in its folder, patches/megatron_core/roll_fix/patch.yaml:

```yaml
summary: Fixes rolls that leave their sequence
kind: correctness
changes: values
concerns: [mtp+packed]
variants:
  v0_16:
    targets: {.roll: [Layer.forward]}
    reads: {.roll: [helper]}
```

Variants inherit what stands at the level of the patch under `targets` and `reads`, so that none repeats it:

```yaml
targets: {.roll: [Layer.forward, {target: roll, optional: true}]}
variants:
  v0_16: {}                      # both targets
  v0_17:
    targets: {.roll: [roll]}     # one of them, which is optional here too
```

A patch outside of shim has the same two files: its entry in a matrix names the `module`, whose folder has the
patch.yaml with a `distribution`. Or all of it stands in the matrix: the keys of patch.yaml, and `distribution`,
`module` and the rules, those of a variant as its `applies`.

People write both files. `shim matrix` checks them: a duplicate or unknown key, a gap or an overlap of ranges, and a
target that no release has are errors with file and line. The fingerprints are in version_matrix.lock.json. `make pins`
measures them on the wheels and writes that file.

All versions and ranges are quoted. A pre-release belongs to its release: 0.18rc1 lies in ">=0.18", and not in "<0.18".
Every supported release must lie in exactly one rule of each patch.
"""


def matrix_page() -> str:
    """The text of docs/matrix.md."""
    lines = [MATRIX_HEAD]
    for name, table in TABLES.items():
        lines += [f"## {name}", "", "| key | | what it says |", "|---|---|---|"]
        lines += [f"| `{key}` | {'required' if table[key] else ''} | {KEYS[name][key]} |" for key in table]
        lines.append("")
    lines += ["## A word of concerns", "", "A size counts above 1.", "", "| word | it holds for |", "|---|---|"]
    lines += [f"| `{word}` | {meaning} |" for word, meaning in WORDS.items()]
    return "\n".join(lines).rstrip() + "\n"

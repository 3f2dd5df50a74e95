"""What docs/explore.html has to show for a choice, from the matrix and the record themselves."""

from packaging.version import Version

from shim.maintenance.docs_defects import proof_texts

CORE, TE = "megatron-core", "transformer-engine"


def hits(matrix, proved, core, te, words=None):
    """{(kind, patch id): {label of a proof: (stock, with shim, pair it was measured on or None)}}

    te: a release, or None if Transformer Engine is not installed.    words: what is trained; None for everything.
    """
    found = {}
    for entry in matrix.patches.values():
        if variant_for(entry, core, te) is None or not concerned(entry, te, words):
            continue
        for text in proof_texts(entry):
            kind = {"time": "memory"}.get(*[text.keywords.get("defect", "silent")] * 2)
            measured = _measured(matrix, proved, entry, text, core, te)
            if measured is not None:
                found.setdefault((kind, entry.id), {})[text.label] = measured
    return found


def variant_for(entry, core, te):
    versions = {CORE: Version(core), **({TE: Version(te)} if te else {})}
    rule = entry.rule_for(versions)
    return None if rule is None else rule.variant


def concerned(entry, te, words):
    def holds(word):
        if word in ("te", "no-te"):
            return (word == "te") == bool(te)
        return words is None or word == "any" or word in words

    return any(all(map(holds, alternative)) for alternative in entry.concerns)


def _measured(matrix, proved, entry, text, core, te):
    depends = text.keywords.get("te") or any(TE in rule.ranges for rule in entry.rules)
    if not depends or proved[core][TE] == te:
        own = proved[core]["proofs"].get(text.label)
        fixed = own is not None and own["verdict"] == "fixed" and (te or not depends)
        return (own["stock"], own["with_shim"], None) if fixed else None
    if te is None:
        return None
    cores, tes = matrix.supported[CORE], matrix.supported[TE]
    variant = variant_for(entry, core, te)
    near = []
    for other, run in proved.items():
        said = run["proofs"].get(text.label)
        if said and said["verdict"] == "fixed" and variant_for(entry, other, run[TE]) == variant:
            by_core = abs(cores.index(other) - cores.index(core))
            by_te = abs(tes.index(run[TE]) - tes.index(te))
            order = (by_core, by_te) if any(CORE in rule.ranges for rule in entry.rules) else (by_te, by_core)
            near.append((order, cores.index(other), (said["stock"], said["with_shim"], (other, run[TE]))))
    return min(near)[-1] if near else None

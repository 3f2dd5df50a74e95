"""Sources of a release with some definitions replaced, removed or changed, as the tests of signs need them."""

import ast
import copy
from functools import cache

from shim._errors import SourceError
from shim._releases.fingerprint import definitions, split_target
from shim._releases.sources import Sources
from shim.testing.releases import fetch

__all__ = ["Edited", "found_in", "sources_of"]


@cache
def sources_of(distribution, release):
    """To parse all releases takes half a minute: tests that do so run in one process, the group `sources`."""
    return Sources([fetch(release, distribution)])


def found_in(sources, target):
    """The nodes that define `target`; none where it is missing."""
    module, qualname = split_target(target)
    try:
        return [definition.node for definition in definitions(sources.tree(module), qualname)]
    except SourceError:
        return []


class Edited(Sources):
    """The sources of a release. What is put here stands here only; the release stays as it is."""

    def __init__(self, sources):
        super().__init__(sources._roots)
        self._upstream, self._edited = sources, {}

    def tree(self, module):
        return self._edited[module] if module in self._edited else self._upstream.tree(module)

    def put(self, target, nodes):
        """Let `nodes` define `target`, in the place of what defines it here. Without any it is missing."""
        module, qualname = split_target(target)
        tree = self._edited.setdefault(module, copy.deepcopy(self._upstream.tree(module)))
        here = [definition.node for definition in definitions(tree, qualname)]
        block = self._block_of(tree, here[0]) if here else self._scope_of(tree, qualname)
        at = block.index(here[0]) if here else len(block)
        block[at:at] = copy.deepcopy(nodes)
        for node in here:
            self._block_of(tree, node).remove(node)

    def replace(self, target, old, new):
        """Change the text `old` in the unparsed source of `target` to `new`, wherever it stands."""
        nodes = found_in(self, target)
        texts = [ast.unparse(node) for node in nodes]
        assert any(old in text for text in texts), f"{target} has no {old!r} any more: {texts}"
        self.put(target, [ast.parse(text.replace(old, new)).body[0] for text in texts])

    def begin(self, target, statement):
        """Put a statement in front of every function that defines `target`."""
        nodes = copy.deepcopy(found_in(self, target))
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                node.body.insert(0, ast.parse(statement).body[0])
        if nodes:
            self.put(target, nodes)

    @staticmethod
    def _block_of(tree, node):
        for parent in ast.walk(tree):
            for _, block in ast.iter_fields(parent):
                if isinstance(block, list) and any(child is node for child in block):
                    return block
        raise LookupError(ast.unparse(node))

    @staticmethod
    def _scope_of(tree, qualname):
        owner = qualname.rpartition(".")[0]
        return definitions(tree, owner)[0].node.body if owner else tree.body

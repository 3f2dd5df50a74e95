"""The documentation site: the Markdown of the repository in the layout of the tree, with a navigation, for mkdocs.

`prepare` writes build/site-src and build/mkdocs.yml, and `check` reads the built pages. Both run without mkdocs.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from shim._matrix import load

from .docs import everything

__all__ = ["Page", "check", "navigation", "prepare", "with_blank_lines", "with_html_links", "with_links"]

TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# What a page loads: by the attribute of these tags, and by links of these relations.
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
COPIED = (".md", ".svg", ".html", ".css")
LINK = re.compile(r"(\]\()([^)\s]+)\)")
# The second is what the script of a page puts behind the names that it links. The script itself has to stay as it is:
# the policy of the page names its hash.
HTML_LINK = re.compile(r'((?:href|data-page-ending)=")([^"#]+)')
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
ITEM = re.compile(r"( *)([-*]|\d+\.) ")
# Public packages -> what their page of the reference says first.
PACKAGES = {
    "shim": "What `import shim` offers. `shim.ops` and `shim.testing` have pages for themselves.",
    "shim.ops": "Algorithms on tensors, which know nothing of megatron.",
    "shim.testing": "Test helpers: real megatron-core on a CPU, ranks, the truth about packed rows, releases.",
}


def prepare(top: Path, repository: str, written: Mapping[Path, str] = MappingProxyType({})) -> Path:
    """Write the sources of the site, and return the configuration for mkdocs.

    top: the tree. repository: the address of the repository, for links to files that are no pages.
    written: texts that take the place of those in the tree, or are not there.
    """
    build = top / "build"
    source = build / "site-src"
    shutil.rmtree(source, ignore_errors=True)
    there = [top / name for name in TOP_PAGES]
    there += [file for file in sorted((top / "docs").rglob("*")) if file.suffix in COPIED]
    texts = {file.relative_to(top).as_posix(): file for file in there}
    pages = texts.keys() | {file.relative_to(top).as_posix() for file in written}

    def text_of(name: str) -> str:
        return written[top / name] if top / name in written else texts[name].read_text("utf-8")

    def elsewhere(path: str) -> bool:
        return path not in pages and (top / path).exists()

    for name in sorted(pages):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            text = with_links(text_of(name), name, elsewhere, repository)
            (source / name).write_text(with_blank_lines(text), "utf-8")
        elif name.endswith(".html"):
            text = with_html_links(text_of(name), name, elsewhere, repository)
            (source / name).write_text(text, "utf-8")
        else:
            (source / name).write_text(text_of(name), "utf-8")
    shutil.move(source / "docs" / "site.css", source / "site.css")
    for package, about in PACKAGES.items():
        page = source / "docs" / "api" / f"{package}.md"
        page.parent.mkdir(exist_ok=True)
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        page.write_text(f"# {package}\n\n{about}\n\n::: {package}\n{options}", "utf-8")
    config = build / "mkdocs.yml"
    patches = sorted(PurePosixPath(name).stem for name in pages if name.startswith("docs/patches/"))
    settings = {
        "INHERIT": "../mkdocs.yml",
        "docs_dir": "site-src",
        "site_dir": "site",
        "nav": navigation((top / "docs" / "index.md").read_text("utf-8"), patches),
    }
    config.write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
    return config


def navigation(index: str, patches: list[str]) -> list[dict[str, Any]]:
    """The tabs of the site: the sections of docs/index.md with the pages that they list, the patches, the reference."""
    tabs: list[dict[str, Any]] = [{"Home": [{"megatron-shim": "README.md"}, {"Documentation": "docs/index.md"}]}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        links = re.findall(r"^- \[([^\]]+)\]\(([^)#\s]+)\)", body, flags=re.MULTILINE)
        pages = ((name, _normal(f"docs/{path}")) for name, path in links)
        tabs.append(
            {title: [{name: path} for name, path in pages if path.endswith(".md") and path != "docs/patches.md"]}
        )
    tabs.append({"Patches": [{"All patches": "docs/patches.md"}, *({id: f"docs/patches/{id}.md"} for id in patches)]})
    tabs.append({"API": [{package: f"docs/api/{package}.md"} for package in PACKAGES]})
    return tabs


def _normal(path: str) -> str:
    """The path without `..`."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _from_top(page: str, target: str) -> str:
    """The path in the tree of what a page calls `target`."""
    return _normal(f"{page.rpartition('/')[0]}/{target}".lstrip("/"))


def with_links(text: str, page: str, elsewhere: Callable[[str], bool], repository: str) -> str:
    """The text of a page, whose links to files that are no pages lead to the repository.

    elsewhere: whether a path of the tree is such a file. A dead link stays, for mkdocs to find.
    """

    def linked(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = _from_top(page, target)
        return f"{found[1]}{repository}/blob/main/{path}{anchor and '#' + anchor})" if elsewhere(path) else found[0]

    return _outside_code(text, lambda part: LINK.sub(linked, part))


def with_html_links(text: str, page: str, elsewhere: Callable[[str], bool], repository: str) -> str:
    """The text of an HTML page, whose links to Markdown lead to what is built of it; `with_links` has the others."""

    def linked(found: re.Match[str]) -> str:
        begin, target = found[1], found[2]
        if target.endswith(".md"):
            return f"{begin}{target.removesuffix('.md')}/"
        path = _from_top(page, target)
        return f"{begin}{repository}/blob/main/{path}" if elsewhere(path) else found[0]

    return HTML_LINK.sub(linked, text)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("`") else change(part) for part in CODE.split(text))


def with_blank_lines(text: str) -> str:
    """For Python-Markdown, in which a list needs a blank line before it, and four spaces for a level."""
    lines: list[str] = []
    inside = fenced = False  # a list, a block of code
    for line in text.split("\n"):
        fenced = fenced != line.lstrip().startswith("```")
        item = None if fenced else ITEM.match(line)
        if item and not inside and lines and lines[-1].strip():
            lines.append("")
        if item and item[1]:
            line = "    " + line.lstrip()
        inside = bool(item) or (inside and not fenced and (line.startswith(" ") or not line.strip()))
        lines.append(line)
    return "\n".join(lines)


class Page(HTMLParser):
    """What a page loads, where its links lead, and the names that links to it may have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "link" and RELATIONS & set(given.get("rel", "").split()):
            self.loaded.append(given.get("href", ""))
        elif given.get(LOADS.get(tag, "")):
            self.loaded.append(given[LOADS[tag]])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


def check(site: Path) -> list[str]:
    """What is wrong with the built site: what it loads from other hosts, and links that lead nowhere."""
    pages = {file: Page(file.read_text("utf-8")) for file in sorted(site.rglob("*.html"))}
    found = [
        f"{_name(site, file)} loads {address}"
        for file, page in pages.items()
        for address in page.loaded
        if _foreign(address)
    ]
    for sheet in sorted(site.rglob("*.css")):
        addresses = re.findall(r"(?:url\(|@import )[\"' ]*([^\"')]+)", sheet.read_text("utf-8"))
        found += [f"{_name(site, sheet)} loads {address}" for address in addresses if _foreign(address)]
    return found + [line for file in pages for line in _dead(site, file, pages)]


def _name(site: Path, file: Path) -> str:
    return file.relative_to(site).as_posix()


def _foreign(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def _dead(site: Path, file: Path, pages: Mapping[Path, Page]) -> Iterator[str]:
    """A line for each link of the page inside the site whose file or heading is not there."""
    for link in [*pages[file].links, *pages[file].loaded]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or file.name == "404.html":  # 404.html has absolute addresses
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            yield f"{_name(site, file)} leads to {link}, which is not there"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in {*pages[target].names, "__top"}:
            yield f"{_name(site, file)} leads to {link}, which has no such heading"


def main(argv: list[str] | None = None) -> int:
    """`prepare` or `check`, for `make docs-site`. Exit 1 if the check finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("prepare", "check"))
    step = parser.parse_args(argv).step
    top = load.PACKAGE.parent
    if step == "prepare":
        repository = re.search(r'^Repository = "(.+)"$', (top / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
        print(prepare(top, repository[1] if repository else "", everything(top)).relative_to(top))
        return 0
    found = check((top / "build" / "site").resolve())
    print("\n".join(found) if found else "no link is dead, and nothing comes from another host")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The sources of the documentation site, which mkdocs builds, and the check of what it has built."""

import re

import pytest
import yaml
from unit_helpers import REPOSITORY

from shim.maintenance.docs import everything
from shim.maintenance.docs_site import (
    Page,
    check,
    main,
    navigation,
    prepare,
    with_blank_lines,
    with_html_links,
    with_links,
)

HERE = "https://example.test/shim"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The sources that are made of this tree: their folder and the settings beside it."""
    top = tmp_path_factory.mktemp("tree")
    for name in ("docs", "patches", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        (top / name).symlink_to(REPOSITORY / name)
    config = prepare(
        top, HERE, {top / name.relative_to(REPOSITORY): text for name, text in everything(REPOSITORY).items()}
    )
    return config.parent / "site-src", yaml.safe_load(config.read_text("utf-8"))


def paths_in(nav):
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else paths_in(value)


def test_every_page_is_in_the_navigation_once(site):
    source, settings = site
    pages = sorted(file.relative_to(source).as_posix() for file in source.rglob("*.md"))
    assert sorted(paths_in(settings["nav"])) == pages
    assert {"README.md", "docs/patches/lr-param-groups.md", "docs/api/shim.ops.md"} <= set(pages)
    assert settings["INHERIT"] == "../mkdocs.yml" and (source / "site.css").is_file()


def test_public_packages_have_a_reference(site):
    source, _ = site
    for package in ("shim", "shim.ops", "shim.testing"):
        assert f"::: {package}\n" in (source / "docs" / "api" / f"{package}.md").read_text()


def test_files_that_are_no_pages_are_linked_in_the_repository(site):
    """Code, examples; also with a heading. Links between pages stay, and so do dead ones and what stands in code."""
    source, _ = site
    code = f"]({HERE}/blob/main/patches/megatron_core/lr_param_groups/__init__.py)"
    assert code in (source / "docs" / "patches" / "lr-param-groups.md").read_text()
    files = {"examples/e.py", "LICENSE"}.__contains__
    text = "[a](../a.md#x) [r](../../README.md) [m](mailto:x) [h](#here) [e](../../examples/e.py#L3) `[e](e.py)`"
    there = text.replace("../../examples", f"{HERE}/blob/main/examples")
    assert with_links(text, "docs/b/c.md", files, HERE) == there
    assert with_links("[l](LICENSE)", "README.md", files, HERE) == f"[l]({HERE}/blob/main/LICENSE)"


def test_the_explorer_leads_to_pages_of_the_site(site):
    """In a checkout they are to Markdown, of which the site has folders. Its script makes some, and stays as it is."""
    source, _ = site
    text = (source / "docs" / "explore.html").read_text()
    assert 'href="defects/"' in text
    assert 'data-page-ending="/"' in text and "`patches/${patch.id}${PAGE_ENDING}`" in text
    pages = list((source / "docs" / "patches").glob("*.md"))
    assert pages and all("\n## See it\n" in page.read_text() for page in pages)
    explorer = everything(REPOSITORY)[REPOSITORY / "docs" / "explore.html"]
    scripts = [re.findall(r"<script>.*?</script>", page, re.DOTALL) for page in (text, explorer)]
    assert scripts[0] == scripts[1] and len(scripts[0]) == 1
    files = {"docs/data.json"}.__contains__
    page = '<a href="#a"> <a href="https://a.test/b"> <a href="data.json#x"> <a href="b.md#c">'
    there = f'<a href="#a"> <a href="https://a.test/b"> <a href="{HERE}/blob/main/docs/data.json#x"> <a href="b/#c">'
    assert with_html_links(page, "docs/p.html", files, HERE) == there


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a:\n- b\n- c\nd", "a:\n\n- b\n- c\nd"),
        ("a\n\n1. b\n   more\n2. c", "a\n\n1. b\n   more\n2. c"),
        ("- a\n  - b\n    more\n  - c", "- a\n    - b\n    more\n    - c"),
        ("- a\n\n- b", "- a\n\n- b"),
        ("```\na\n- b\n  - c\n```", "```\na\n- b\n  - c\n```"),
        ("a - b\n-c", "a - b\n-c"),
    ],
)
def test_lists_are_lists_for_python_markdown(text, wanted):
    assert with_blank_lines(text) == wanted


def test_the_tabs_are_the_sections_of_the_index():
    tabs = navigation(
        "# D\n\n## Learn\n\n- [One](one.md): x, see [two](two.md).\n- [C](../C.md#x)\n- [P](p.html).\n", ["a", "b"]
    )
    assert tabs[1] == {"Learn": [{"One": "docs/one.md"}]}
    assert tabs[2] == {
        "Patches": [{"All patches": "docs/patches.md"}, {"a": "docs/patches/a.md"}, {"b": "docs/patches/b.md"}]
    }
    assert [*tabs[3]] == ["API"]


def test_a_page_says_what_it_loads_and_where_it_leads():
    page = Page(
        '<link rel="stylesheet" href="a.css"><link rel="canonical" href="https://x.test/"><script src="b.js"></script>'
        '<img src="c.png" id="c"><a href="d/#e" name="f">d</a>'
    )
    assert page.loaded == ["a.css", "b.js", "c.png"] and page.links == ["d/#e"] and page.names == {"c", "f"}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ('<a href="b/#x">b</a><a href="https://other.test/">o</a><a href="#__top">t</a>', []),
        ('<script src="https://cdn.test/a.js"></script>', ["index.html loads https://cdn.test/a.js"]),
        ('<img src="//cdn.test/a.png">', ["index.html loads //cdn.test/a.png"]),
        ('<a href="b/#y">b</a>', ["index.html leads to b/#y, which has no such heading"]),
        ('<a href="c/">c</a>', ["index.html leads to c/, which is not there"]),
        ('<img src="a.png">', ["index.html leads to a.png, which is not there"]),
    ],
)
def test_foreign_hosts_and_dead_links_are_found(tmp_path, page, said):
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "b" / "index.html").write_text('<h1 id="x">b</h1>')
    found = [line for line in check(tmp_path) if "//cdn" not in line or "loads" in line]
    assert found == said


def test_a_style_sheet_that_loads_fonts_is_found(tmp_path):
    (tmp_path / "a.css").write_text('@import "https://fonts.test/a.css"; p { background: url(data:x) url(b.png) }')
    assert check(tmp_path) == ["a.css loads https://fonts.test/a.css"]


def test_a_step_is_asked_for():
    with pytest.raises(SystemExit):
        main([])


def test_the_theme_asks_no_other_host():
    """Fonts would come from Google, and stars of the repository from GitHub's API, on every page."""
    text = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    assert "\n  font: false" in text and "\nrepo_url:" not in text and "http" not in text.partition("\nextra_css")[2]

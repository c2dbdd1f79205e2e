"""The documentation site builds without a warning, all its links lead somewhere, and it needs no other host."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import contextready

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[docs]')")

LOADED = dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src") | {"link": "href"}
"""Tags whose address the browser loads by itself, with the attribute that holds it."""
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """The anchors, addresses and prose of one page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads, self.prose, self.paragraphs = set(), [], [], [], []
        self._open = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag in LOADED and LOADED[tag] in attributes:
            self.loads.append(attributes[LOADED[tag]])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "p":
            self.paragraphs.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style", "code", "pre"} & set(self._open):
            self.prose.append(data)
            if "p" in self._open:
                self.paragraphs[-1] += data


def is_foreign(address):
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def nav_pages(entries):
    for entry in entries:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else nav_pages(target)


@pytest.fixture(scope="module")
def nav():
    class Loader(yaml.SafeLoader):
        """Reads the file without running what its Python tags name."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    return list(nav_pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_navigation_is_built(nav, site):
    assert len(nav) == len(set(nav))
    for page in nav:
        assert (ROOT / "docs" / page).is_file(), page
        assert (site / page).with_suffix(".html").is_file(), page


def test_every_link_leads_to_a_file_and_every_fragment_to_an_anchor(site, pages):
    broken, checked = [], 0
    for path, page in pages.items():
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if is_foreign(address) or parts.scheme in ("mailto", "data", "javascript"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment)
            checked += 1
            if not target.is_relative_to(site.resolve()) or not target.is_file():
                broken.append(f"{path.relative_to(site)}: {address} is not a file of the site")
            elif fragment and target in pages and fragment not in pages[target].ids:
                broken.append(f"{path.relative_to(site)}: {address} is not an anchor")
    assert not broken, "\n".join(broken)
    assert checked > 500


def test_no_page_loads_anything_from_another_host(site, pages):
    for path, page in pages.items():
        assert not [address for address in page.loads if is_foreign(address)], path
        assert 'class="mermaid"' not in path.read_text(), f"{path}: the theme loads mermaid from another host"
    for path in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", path.read_text())
        assert not [address for address in addresses if is_foreign(address)], path


def test_no_markdown_is_left_in_the_text(site, pages):
    """GitHub accepts more than MkDocs does, for example a list directly after a paragraph."""
    left = []
    for path, page in pages.items():
        found = [text for text in page.prose if re.search(r"\]\(|\]\[\w*\]|^:::|```|\*\*", text)]
        found += [text for text in page.paragraphs if re.search(r"^([-*|]|\d\.|#+) ", text, flags=re.MULTILINE)]
        left += [f"{path.relative_to(site)}: {' '.join(text.split())[:120]}" for text in found]
    assert not left, "\n".join(left)


def test_every_public_name_is_in_the_api_reference(site, pages):
    documented = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "api"))
    assert {f"contextready.{name}" for name in contextready.__all__} <= documented

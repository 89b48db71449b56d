"""Search of the docs works in pages that are opened from disk: no server, no request."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browser import PROGRAM, Browser

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("index.md", "quantised.md", "sweeps.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Three pages with the site's own theme, plugins and scripts; the whole site takes a minute."""
    folder = tmp_path_factory.mktemp("docs")
    settings = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    shutil.copytree(
        DOCS / "pages", folder / "pages", ignore=lambda _, names: [name for name in names if name.endswith(".md")]
    )
    for name in PAGES:
        shutil.copy(DOCS / "pages" / name, folder / "pages")
    settings |= {"site_dir": str(folder / "site"), "docs_dir": str(folder / "pages"), "strict": False}
    settings["plugins"] = [plugin for plugin in settings["plugins"] if plugin in ("search", "offline")]
    del settings["hooks"], settings["nav"]
    (folder / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=folder, check=True, capture_output=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    return folder / "site"


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_search_finds_words_of_other_pages_from_disk(site):
    browser = Browser()
    try:
        browser.open((site / "index.html").as_uri())
        browser.wait("document.querySelector('.md-search__input') !== null && document.readyState === 'complete'")
        browser.value("document.querySelector('.md-search__input').focus()")
        browser.value("""(() => {
          const field = document.querySelector(".md-search__input");
          field.value = "halving";
          field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
        })()""")
        links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        hits = browser.wait(links)
        assert any(hit.startswith((site / "sweeps.html").as_uri()) for hit in hits)
        asked = browser.value("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [address for address in asked if not address.startswith(("file:", "blob:", "data:"))] == []
    finally:
        browser.close()

"""mkdocs' hook: links from docs/ to files of the repository (`../trainer/x.py`) become plain names on the site."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with every link out of docs/ replaced by the words that were linked."""

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if "://" not in link[2] and target.startswith("..") else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, markdown)

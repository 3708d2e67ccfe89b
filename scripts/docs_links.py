"""Hook of mkdocs: on the site, turn links to files outside docs/ (`../trainer/x.py`) into plain text."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text with every link out of docs/ replaced by the link's text."""

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if "://" not in link[2] and target.startswith("..") else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, markdown)

# SPDX-License-Identifier: MIT
"""For mkdocs: roles of docstrings (``:func:`attention```) are shown as plain code."""

import re


def on_page_content(html: str, **_: object) -> str:
    """Removes the names of roles before code."""
    return re.sub(r":(?:func|mod|class|meth):(<code>)", r"\1", html)

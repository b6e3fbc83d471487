"""Text of HTML: what a reader sees of a title or a description that was written for a web page."""

from __future__ import annotations

import html
import re

from selectolax.lexbor import LexborHTMLParser

_BLOCKS = (
    "address|article|aside|blockquote|body|br|caption|center|dd|details|div|dl|dt|fieldset|"
    "figcaption|figure|footer|form|h1|h2|h3|h4|h5|h6|header|hr|img|li|main|nav|ol|option|p|pre|"
    "section|summary|table|tbody|td|tfoot|th|thead|tr|ul|video"
)
_INLINE = (
    "a|abbr|b|bdi|bdo|big|button|cite|code|col|del|dfn|em|font|head|html|i|iframe|input|ins|kbd|"
    "label|link|mark|meta|q|s|samp|script|small|span|strike|strong|style|sub|sup|svg|template|time|"
    "title|tt|u|var|wbr"
)
# `a < b`, `<3` and `vector<int>` are no markup.
_NAMES = frozenset(f"{_BLOCKS}|{_INLINE}".split("|"))
_UNREAD = ["script", "style", "template", "title"]
_TAG = re.compile(r"<(?:!--|!doctype\b|/?([a-z][a-z\d]*)(?=[\s/>]))", re.IGNORECASE)
_BLOCK = re.compile(rf"</?(?=[a-z])(?:{_BLOCKS})(?=[\s/>])", re.IGNORECASE)
_ANY_TAG = re.compile("<[^<>]*>")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});", re.IGNORECASE)
_MOST_TAGS = 2_000  # that are parsed: a parser takes quadratic time for tags within each other


def plain_text(text: str) -> str:
    """Return the text of HTML, its white space as single spaces; a text without markup as it is.

    Blocks are apart from each other, and inline elements are not: `<b>st</b>urdy` is one word.
    """
    if any(tag[1] is None or tag[1].lower() in _NAMES for tag in _TAG.finditer(text)):
        spaced = _BLOCK.sub(r" \g<0>", text)
        if spaced.count("<") > _MOST_TAGS:
            return " ".join(html.unescape(_ANY_TAG.sub(" ", spaced)).split())
        tree = LexborHTMLParser(spaced)
        tree.strip_tags(_UNREAD)
        return "" if tree.body is None else " ".join(tree.body.text().split())
    if "&" in text and _ENTITY.search(text):
        return html.unescape(text)
    return text

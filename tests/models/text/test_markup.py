"""The text of HTML."""

import pytest

from models.text.terms import plain_text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "<p>A <strong>sturdy</strong> mug&nbsp;for piers.</p><ul><li>350&nbsp;ml</li></ul>Gift",
            "A sturdy mug for piers. 350 ml Gift",
        ),
        ("<p>one<p>two<br/>three", "one two three"),
        ("<b>st</b>urdy", "sturdy"),
        ("<style>p { color: red }</style><SCRIPT>alert(1)</SCRIPT>seen<!-- not -->", "seen"),
        ("<td>1</td><td>2</td>", "1 2"),
        ("Tom &amp; Jerry&#39;s", "Tom & Jerry's"),
        ("a < b and c > d,  I <3 vector<int> &c. AT&T", None),
        ("two\n\nlines", None),
        ("", None),
    ],
)
def test_markup_is_read_as_its_text(written: str, read: str | None) -> None:
    """Elements, comments and references go; a text without markup stays as it is."""
    assert plain_text(written) == (written if read is None else read)


def test_tags_within_tags_without_end_are_read_without_a_parser() -> None:
    """More tags than are parsed, which may be nested, leave their text all the same."""
    assert plain_text("<div>" * 50_000 + "deep &amp; still") == "deep & still"

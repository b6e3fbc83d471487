"""The mapping of the page's roles to fields of items, and its route."""

from __future__ import annotations

import pytest

from service.domain.settings import Settings, parse_page_fields


def test_roles_and_labels_are_read() -> None:
    """Pairs are separated by commas; spaces around words do not count, those inside do."""
    text = " image = attributes.img , price=attributes.a b.c,Brand=categories,, "
    assert parse_page_fields(text) == {
        "image": "attributes.img",
        "price": "attributes.a b.c",
        "Brand": "categories",
    }
    assert parse_page_fields("") == {}
    default = Settings.model_fields["page_fields"].default
    assert set(parse_page_fields(default)) == {"price", "url"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image", "'image' must be role=field"),
        ("=title", "must be role=field"),
        ("image=", "must be role=field"),
        ("image=img", "'img' in 'image=img' must be one of item_id, .* and attributes.NAME"),
        ("image=attributes.", "must be one of"),
        ("a=title,a=tags", "'a' stands there twice"),
    ],
)
def test_a_wrong_part_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_page_fields(text)

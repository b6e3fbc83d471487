"""Records of the domain, their validation, and partial changes of items.

Ids are strings that round-trip byte for byte; timestamps are integer microseconds since the Unix
epoch, UTC; vectors are one-dimensional float32 arrays. Constructors check nothing, so that
millions of records can be built cheaply; the `check_*` functions are called once, where records
enter a store, and raise `Invalid` with a JSON pointer to the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.domain.timestamps import MAX_TIMESTAMP, MIN_TIMESTAMP

T = TypeVar("T")
ATTRIBUTES = "attributes."  # the prefix of the field name of an attribute
MAX_FIELD_NAME = 1_000  # characters
Vector = NDArray[np.float32]

DISLIKE = "dislike"  # the type of negative events
RETURN = "return"  # the type of events of a negative quantity
NEGATIVE = frozenset((DISLIKE, RETURN))  # speak for no item; also in models.data.interactions
MAX_ID_BYTES = 256
MAX_ATTRIBUTE_DEPTH = 32  # deeper documents are an attack, not data
MAX_ATTRIBUTES = 1_000  # distinct names in one document, nested ones too; each is a column
MAX_LABELS = 1_000  # in each list of an item, and interests of a user
# A weight enters a score as its logarithm, and float32 has no smaller normal number than this.
MIN_WEIGHT = 1.2e-38
MAX_WEIGHT = float(np.finfo(np.float32).max)


class _Record:
    """Base of records: equality by field, arrays included, which dataclasses cannot compare."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # they hold mappings and arrays

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _same(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a is not None and b is not None and np.array_equal(a, b)
    return bool(a == b)


@dataclass(frozen=True, slots=True, eq=False)
class Event(_Record):
    """One interaction of a user with an item: one row of that user's memory.

    The store assigns an `event_id` and a `timestamp` (its arrival) where they are None. `key` and
    `value` override the vectors that the model derives from the item.
    """

    user_id: str
    item_id: str
    event_id: str | None = None
    type: str = "view"
    weight: float = 1.0
    timestamp: int | None = None
    key: Vector | None = None
    value: Vector | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Item(_Record):
    """One item of the catalogue. A hidden item stays in histories but is never in an answer."""

    item_id: str
    title: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    embedding: Vector | None = None
    hidden: bool = False
    published_at: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class User(_Record):
    """A user profile: attributes, and interests (categories or item ids) that act as memory."""

    user_id: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    interests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgment:
    """Graded relevance of an item to a query; a gain above 0 means relevant."""

    query: str
    item_id: str
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One version of a saved question.

    Versions of a name count from 1, and none is used twice, not even after a deletion.
    """

    name: str
    version: int
    written: int  # microseconds UTC
    body: Mapping[str, Any] | None  # JSON: its question, fields and fallback; None: deleted

    @property
    def question(self) -> str:
        return str((self.body or {}).get("question", ""))

    @property
    def fallback(self) -> str | None:
        """The scenario that fills up what this one leaves empty."""
        return (self.body or {}).get("fallback")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of the question; null stands for one that is left out."""
        given = {name: value for name, value in (self.body or {}).items() if value is not None}
        return {name: given[name] for name in given if name not in {"question", "fallback"}}


# ------------------------------------------------------------------------------ rules


def check_id(value: str, pointer: str = "") -> str:
    """Return `value` if it is an id: 1 to 256 bytes of valid UTF-8 without NUL.

    Raises `Invalid` at `pointer` otherwise. Ids are not normalised: two ids are equal exactly when
    their bytes are.
    """
    if not isinstance(value, str):
        raise Invalid(pointer, f"must be a string, not {type(value).__name__}")
    size = len(value) if value.isascii() else _utf8_size(value, pointer)
    if not 1 <= size <= MAX_ID_BYTES:
        raise Invalid(pointer, f"must be 1 to {MAX_ID_BYTES} bytes of UTF-8; it has {size}")
    if "\0" in value:
        raise Invalid(pointer, "must not contain NUL (U+0000)")
    return value


def are_plain_ids(values: Sequence[Any]) -> bool:
    """Return True only if all values are ids, in a tenth of the time of `check_id` for each.

    For a list with a character beyond ASCII and an id of more than 64 characters it returns False,
    though all may be ids.
    """
    try:
        text = "".join(values)
        text.encode()
    except (TypeError, UnicodeEncodeError):  # no string, or no valid UTF-8
        return False
    sizes = set(map(len, values))
    most = MAX_ID_BYTES if text.isascii() else MAX_ID_BYTES // 4  # a character has up to 4 bytes
    return not sizes or (min(sizes) >= 1 and max(sizes) <= most and "\0" not in text)


def check_judgment(judgment: Judgment) -> None:
    """Raise `Invalid` at the field that breaks a rule."""
    _check_text(judgment.query, "/query")
    check_id(judgment.item_id, "/item_id")


def _check_text(value: str, pointer: str) -> None:
    if not isinstance(value, str):
        raise Invalid(pointer, f"must be a string, not {type(value).__name__}")
    _utf8_size(value, pointer)


def _utf8_size(value: str, pointer: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise Invalid(
            pointer,
            f"has a lone surrogate at character {error.start}; only valid UTF-8 is allowed",
        ) from None


def _check_timestamp(value: int, pointer: str) -> None:
    """Raise `Invalid` unless `value` is microseconds UTC that RFC 3339 can express."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(pointer, f"must be integer microseconds, not {type(value).__name__}")
    if not MIN_TIMESTAMP <= value <= MAX_TIMESTAMP:
        raise Invalid(pointer, "must lie between the years 0001 and 9999")


def check_weight(value: float, pointer: str = "") -> float:
    """Return `value` if it is a positive normal float32 number; raises `Invalid`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(pointer, f"must be a number, not {type(value).__name__}")
    if value <= 0:
        why = "leave out an event that counts for nothing"
        if value < 0:
            why = "an event of type dislike says that a user does not want an item"
        raise Invalid(pointer, f"must be above 0 (got {value:g}); {why}")
    if not MIN_WEIGHT <= value <= MAX_WEIGHT:  # also refuses NaN
        raise Invalid(
            pointer, f"must be finite, from {MIN_WEIGHT:.3g} to {MAX_WEIGHT:.3g}, not {value:g}"
        )
    return value


def _check_vector(value: Vector, pointer: str) -> None:
    """Raise `Invalid` unless `value` is a float32 array [d], d >= 1, of finite numbers."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        raise Invalid(pointer, "must be a float32 array")
    if value.ndim != 1 or value.size == 0:
        raise Invalid(
            pointer, f"must be one row of at least one number; its shape is {value.shape}"
        )
    if not np.isfinite(value).all():
        raise Invalid(pointer, "must hold finite numbers only")


def check_attributes(value: Mapping[str, Any], pointer: str = "") -> Mapping[str, Any]:
    """Return `value` if it is a JSON object that round-trips exactly.

    Allowed inside: None, booleans, strings of valid UTF-8, finite floats, integers of 64 bits,
    lists and objects of these, at most 32 deep. At most 1,000 distinct names are allowed, and 1,000
    characters in the names that lead to a value. Raises `Invalid` at the offending member.
    """
    if not isinstance(value, Mapping):
        raise Invalid(pointer, f"must be an object, not {type(value).__name__}")
    _JsonCheck(pointer).check(value, pointer, "attributes", MAX_ATTRIBUTE_DEPTH)
    return value


def parse_json(data: bytes | str) -> Any:
    """Parse strict JSON: no NaN, no number beyond floats, no surrogates.

    Integers are exact whatever their size, so that the check of a field can refuse them: orjson
    rounds those beyond 64 bits to floats.

    Raises:
        orjson.JSONDecodeError: a `json.JSONDecodeError`.
    """
    value = orjson.loads(data)
    if _has_long_integer(data.encode() if isinstance(data, str) else data):
        try:
            return json.loads(data)
        except RecursionError:
            text = data if isinstance(data, str) else data.decode()
            raise orjson.JSONDecodeError("it is nested too deep", text, 0) from None
    return value


_DIGITS = bytes(ord("0") if chr(byte).isdigit() else byte for byte in range(128)) + bytes(128)
_LONG = b"0" * 19  # integers beyond 64 bits have at least as many digits


def _has_long_integer(data: bytes) -> bool:
    """Report whether JSON may have an integer beyond 64 bits, faster than a regular expression."""
    digits = data.translate(_DIGITS)
    at = digits.find(_LONG)
    while at > 0 and digits[at - 1] == ord("."):
        at = digits.find(_LONG, at + len(_LONG))
    return at >= 0


class _JsonCheck:
    """Check of one document, which counts its distinct names."""

    def __init__(self, pointer: str) -> None:
        self._pointer = pointer
        self._fields: set[str] = set()

    def check(self, value: Any, pointer: str, field: str, depth: int) -> None:
        """Raise `Invalid` unless a value of a field is allowed at a pointer.

        `depth` is the number of levels that it may have.
        """
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, str):
            _utf8_size(value, pointer)
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise Invalid(pointer, "integers must fit in 64 bits; write a larger one as a text")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise Invalid(pointer, "numbers must be finite")
        elif depth == 0:
            raise Invalid(pointer, f"must not be nested more than {MAX_ATTRIBUTE_DEPTH} deep")
        elif isinstance(value, Mapping):
            for name, member in value.items():
                if not isinstance(name, str):
                    raise Invalid(pointer, f"names must be strings, not {type(name).__name__}")
                _utf8_size(name, pointer)
                inner = self._met(name, pointer, field)
                escaped = name.replace("~", "~0").replace("/", "~1")  # RFC 6901, section 3
                self.check(member, f"{pointer}/{escaped}", inner, depth - 1)
        elif isinstance(value, (list, tuple)):
            for index, member in enumerate(value):
                self.check(member, f"{pointer}/{index}", field, depth - 1)
        else:
            raise Invalid(pointer, f"JSON has no {type(value).__name__}")

    def _met(self, name: str, pointer: str, field: str) -> str:
        """Return the field of a member, and count it."""
        if len(field) + 1 + len(name) > MAX_FIELD_NAME:
            raise Invalid(
                pointer,
                f"has a name of {len(name):,} characters; at most {MAX_FIELD_NAME:,} are allowed "
                "in all names that lead to a value",
            )
        inner = f"{field}.{name}"
        self._fields.add(inner)
        if len(self._fields) > MAX_ATTRIBUTES:
            raise Invalid(
                self._pointer,
                f"has more than {MAX_ATTRIBUTES:,} names, nested ones counted; at most "
                f"{MAX_ATTRIBUTES:,} are allowed",
            )
        return inner


def check_event(event: Event) -> None:
    """Raise `Invalid` at the first field of `event` that breaks a rule."""
    check_id(event.user_id, "/user_id")
    check_id(event.item_id, "/item_id")
    if event.event_id is not None:
        check_id(event.event_id, "/event_id")
    check_id(event.type, "/type")
    check_weight(event.weight, "/weight")
    if event.timestamp is not None:
        _check_timestamp(event.timestamp, "/timestamp")
    if event.key is not None:
        _check_vector(event.key, "/key")
    if event.value is not None:
        _check_vector(event.value, "/value")


def check_item(item: Item) -> None:
    """Raise `Invalid` at the first field of `item` that breaks a rule."""
    check_id(item.item_id, "/item_id")
    _check_text(item.title, "/title")
    _check_text(item.description, "/description")
    _check_names(item.tags, "/tags")
    _check_names(item.categories, "/categories")
    check_attributes(item.attributes, "/attributes")
    if item.embedding is not None:
        _check_vector(item.embedding, "/embedding")
    if not isinstance(item.hidden, bool):
        raise Invalid("/hidden", "must be true or false")
    if item.published_at is not None:
        _check_timestamp(item.published_at, "/published_at")


def check_user(user: User) -> None:
    """Raise `Invalid` at the first field of `user` that breaks a rule."""
    check_id(user.user_id, "/user_id")
    check_attributes(user.attributes, "/attributes")
    _check_names(user.interests, "/interests")


def check_each(records: Iterable[T], check: Callable[[T], None], pointer: str) -> None:
    """Apply `check` to each of a list that stands at `pointer`, to which its errors then point."""
    for index, record in enumerate(records):
        try:
            check(record)
        except Invalid as error:
            raise Invalid(f"{pointer}/{index}{error.pointer}", error.detail) from None


def _check_names(values: Sequence[str], pointer: str) -> None:
    if not isinstance(values, tuple):
        raise Invalid(pointer, f"must be a tuple of strings, not {type(values).__name__}")
    if len(values) > MAX_LABELS:
        raise Invalid(pointer, f"has {len(values):,} entries; at most {MAX_LABELS:,} are allowed")
    for index, value in enumerate(values):
        check_id(value, f"{pointer}/{index}")


def check_finite(what: str, numbers: Iterable[float]) -> None:
    """Raise `ArithmeticError` unless all numbers of an answer are finite: NaN would be null."""
    if not all(map(math.isfinite, numbers)):
        raise ArithmeticError(f"{what} came out as NaN or infinity")


# ------------------------------------------------- changes of items, by JSON Merge Patch


@dataclass(frozen=True, slots=True)
class ItemPatch:
    """Changes of some fields of an item; the others stay as they are.

    A field that is None gets its default. `attributes` are merged: a member that is None is
    removed, and objects are merged in turn.
    """

    item_id: str
    changes: Mapping[str, Any]  # by field of `Item`, of the field's type or None

    def apply(self, item: Item | None) -> Item:
        """Apply the patch to an item, or to a new item of defaults.

        Raises `Invalid` if the merged attributes break a rule.
        """
        item = Item(self.item_id) if item is None else item
        changes = dict(self.changes)
        for name, value in self.changes.items():
            if value is None:
                changes[name] = getattr(_DEFAULTS, name)
        if self.changes.get("attributes") is not None:
            merged = merge_patch(item.attributes, self.changes["attributes"])
            if item.attributes:  # the merged attributes may exceed bounds that the patch meets
                try:
                    check_attributes(merged, "/attributes")
                except Invalid as error:
                    detail = f"of item {self.item_id!r}, once changed: {error.detail}"
                    raise Invalid(error.pointer, detail) from None
            changes["attributes"] = merged
        return replace(item, **changes)


_DEFAULTS = Item("")


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a merge patch to a JSON value (RFC 7396, section 2); neither is changed."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged

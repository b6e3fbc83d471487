"""Exports of an invented wholesaler, with the dirt that such files have, and what they mean.

Of the files: semicolons, Windows line ends, Latin-1 letters in one and a byte order mark in
another, local times without seconds, no event ids, and nights that overlap.

Of the catalogue: decimal commas, quotes within names, spaces after them, departments that differ in
case alone, and a product without a name.

Of the orders: returns as negative quantities, articles that the catalogue does not have, lines that
a file has twice, spaces around ids, a quantity of 80,000 and a date in the future, all of which are
stored; and orders without a customer, dates that do not exist, a quote that is never closed, a
quantity that is no number and a line with a column too many, which are bad.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

LONDON = ZoneInfo("Europe/London")
DEPARTMENTS = ("Garden", "Kitchen", "Christmas", "Stationery", "Café", "Jewellery")
_WORDS = ("HEART", "LANTERN", "MUG", "RIBBON", "BIRD", "STAR", "BASKET", "CANDLE", "TIN", "CARD")
_COLOURS = ("RED", "WHITE", "BLUE", "PINK", "IVORY")
_PRODUCTS = 120
_CUSTOMERS = 90
_FIRST_CUSTOMER = 12_300
_FIRST_DAY = datetime(2025, 3, 3, 9, 0, tzinfo=LONDON)  # the clock changes on the 30th
_DAYS = 45


class Product(NamedTuple):
    """One line of a catalogue."""

    sku: str
    title: str
    department: str
    price: float  # in pounds, to the penny
    stock: int


class Order(NamedTuple):
    """One line of an order."""

    customer: str
    sku: str
    at: datetime  # in London
    quantity: int  # negative for a return


class Sales(NamedTuple):
    """The catalogue of a shop, and its orders by time."""

    products: Sequence[Product]
    orders: Sequence[Order]
    nights: tuple[datetime, datetime, datetime]
    """The first file ends before the second of them, and the other begins with the first of them
    and ends before the third."""


def invented() -> Sales:
    """Draw the sales of a wholesaler whose customers keep to one or two departments."""
    random_ = random.Random(0)
    products = []
    for number in range(_PRODUCTS):
        department = DEPARTMENTS[number % len(DEPARTMENTS)]
        sku = f"{20_000 + 7 * number}{'AB'[number % 2] if number % 3 == 0 else ''}"
        words = (random_.choice(_COLOURS), random_.choice(_WORDS), random_.choice(_WORDS))
        title = " ".join((*words, department.upper(), str(number)))
        price, stock = round(random_.uniform(0.4, 14.0), 2), random_.randrange(500)
        products.append(Product(sku, title, department, price, stock))
    of = {name: [each.sku for each in products if each.department == name] for name in DEPARTMENTS}
    orders: list[Order] = []
    for number in range(_CUSTOMERS):
        customer = str(_FIRST_CUSTOMER + number)
        liked = random_.sample(DEPARTMENTS, 2)
        for _ in range(random_.randrange(3, 8)):
            at = _FIRST_DAY + timedelta(
                days=random_.randrange(_DAYS), minutes=random_.randrange(480)
            )
            for _ in range(random_.randrange(1, 7)):
                name = liked[0] if random_.random() < 0.8 else liked[1]
                quantity = random_.choice((1, 2, 6, 12, 48))
                orders.append(Order(customer, random_.choice(of[name]), at, quantity))
    orders.sort(key=lambda order: order.at)
    days = (25, 30, _DAYS)
    first, second, last = (_FIRST_DAY.replace(hour=0) + timedelta(days=day) for day in days)
    return Sales(products, orders, (first, second, last))


_FAR = datetime(2099, 12, 31, 23, 59, tzinfo=LONDON)
_UNKNOWN = "DOTCOM"  # an article that no catalogue has


class Sale(NamedTuple):
    """One line of an order, as it should be stored."""

    user_id: str
    item_id: str
    type: str
    timestamp: int  # microseconds UTC
    weight: float  # to six digits


class Exports(NamedTuple):
    """The files, and what they mean."""

    products: Path
    nights: tuple[Path, Path]
    prices: dict[str, float]
    departments: dict[str, str]
    sales: tuple[Counter[Sale], Counter[Sale]]  # of each night
    bad_rows: tuple[int, int]  # of each night

    @property
    def stored(self) -> Counter[Sale]:
        """The union of both nights: of equal lines, as many as the night with more of them has."""
        return self.sales[0] | self.sales[1]


def write_exports(shop: Sales, folder: Path) -> Exports:
    """Write `products.csv`, `orders-1.csv` and `orders-2.csv`."""
    catalogue = folder / "products.csv"
    catalogue.write_bytes(_catalogue(shop).encode("latin-1"))
    orders = _with_dirt(shop)
    middle, end, last = shop.nights
    own = (
        [order for order in orders if order.at < end],
        [order for order in orders if order.at >= middle and (order.at < last or order.at == _FAR)],
    )
    nights, bad = [], []
    for number, lines in enumerate(own):
        text, count = _night(lines, number)
        path = folder / f"orders-{number + 1}.csv"
        path.write_bytes(text.encode("utf-8-sig" if number else "latin-1"))
        nights.append(path)
        bad.append(count)
    return Exports(
        catalogue,
        (nights[0], nights[1]),
        {each.sku: each.price for each in shop.products},
        {each.sku: each.department for each in shop.products},
        (Counter(map(_sale, own[0])), Counter(map(_sale, own[1]))),
        (bad[0], bad[1]),
    )


def _catalogue(shop: Sales) -> str:
    lines = ["StockCode;Description;Department;UnitPrice;InStock"]
    for number, each in enumerate(shop.products):
        title = each.title.replace(";", ",")
        if '"' in title or number % 29 == 7:
            name, _, last = title.replace('"', "").rpartition(" ")
            title = f'"{name} ""{last}"""'
        elif number % 13 == 3:
            title += "  "
        if number == len(shop.products) - 1:
            title = ""
        department = each.department.upper() if number % 17 == 5 else each.department
        price = f"{each.price:.2f}".replace(".", ",")
        lines.append(f"{each.sku};{title};{department};{price};{each.stock}")
    return "".join(f"{line}\r\n" for line in lines)


def _with_dirt(shop: Sales) -> list[Order]:
    """Add what is odd and stored to the orders, which stay sorted by time."""
    orders = list(shop.orders)
    latest = {order.customer: order for order in orders}
    orders += [
        order._replace(at=order.at + timedelta(hours=1), quantity=-1)
        for order in list(latest.values())[::7]
    ]
    first = orders[0]
    orders.append(first._replace(sku=_UNKNOWN))
    orders.append(first._replace(quantity=80_000))
    orders.append(first._replace(at=_FAR))
    orders.extend(orders[10:20])  # lines that are there twice
    return sorted(orders, key=lambda order: order.at)


def _night(orders: Sequence[Order], number: int) -> tuple[str, int]:
    """Write one night's file, and count the rows in it that are bad."""
    lines = ["Invoice;CustomerNo;SKU;Qty;Order Date"]
    for place, (customer, sku, at, quantity) in enumerate(orders):
        space = " " if place % 31 == 4 else ""
        when = f"{at:%d/%m/%Y %H:%M}"
        lines.append(f"{500_000 + place};{customer}{space};{space}{sku};{quantity};{when}")
    customer, sku, at, _ = orders[0]
    day = f"{at:%d/%m/%Y}"
    bad = [
        f"700001;;{sku};1;{day} 10:00",  # nobody ordered it
        f"700002;{customer};{sku};1;31/02/{at:%Y} 10:00",  # a day that there is not
        f'700003;{customer};"{sku};1;{day} 10:00',  # the quote is not closed
        f"700004;{customer};{sku};many;{day} 10:00",
        f"700005;{customer};{sku};1;{day} 10:00;gift",  # a column too many
    ][number:]
    for place, line in enumerate(bad):
        lines.insert(2 + 9 * place, line)
    return "".join(f"{line}\r\n" for line in lines), len(bad)


def _sale(order: Order) -> Sale:
    customer, sku, at, quantity = order
    micros = round(at.timestamp()) * 1_000_000
    weight = round(1 + math.log(abs(quantity)), 6)
    return Sale(customer, sku, "return" if quantity < 0 else "purchase", micros, weight)

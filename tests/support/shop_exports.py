"""Exports of an invented wholesaler, with the dirt that such files have, and what they mean.

The dirt: semicolons, Windows line ends, Latin-1 letters in one file and a byte order mark in
another, decimal commas, local times without seconds, returns as negative quantities, orders without
a customer, dates that do not exist, a quote that is never closed, articles that the catalogue does
not have, lines that a file has twice, departments that differ in case alone, and a product without
a name. Nights overlap.
"""

from __future__ import annotations

import math
import random
from collections import Counter
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
_FIRST_DAY = datetime(2025, 3, 3, 9, 0, tzinfo=LONDON)  # the clock changes on the 30th
_NIGHTS = 30, 45  # days that the first file ends with, and the second; the second starts at 25

PRODUCT_OPTIONS = (
    "--map", "item_id=StockCode", "--map", "title=Description", "--map", "categories=Department",
    "--map", "attributes.price:number=UnitPrice", "--map", "attributes.stock=InStock",
)  # fmt: skip
ORDER_OPTIONS = (
    "--map", "user_id=CustomerNo", "--map", "item_id=SKU", "--map", "timestamp=Order Date",
    "--constant", "type=purchase", "--weight-from", "Qty:log", "--negative", "return",
    "--timezone", "Europe/London",
)  # fmt: skip


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


def write_exports(folder: Path, seed: int = 0) -> Exports:
    """Write the exports of a wholesaler whose customers keep to one or two departments."""
    random_ = random.Random(seed)
    products, prices, departments = _products(random_)
    lines = ["StockCode;Description;Department;UnitPrice;InStock"]
    for number, (sku, title) in enumerate(products.items()):
        department = departments[sku]
        written = department.upper() if number % 17 == 5 else department
        price = f"{prices[sku]:.2f}".replace(".", ",")
        lines.append(f"{sku};{title};{written};{price};{random_.randrange(500)}")
    catalogue = folder / "products.csv"
    catalogue.write_bytes("".join(f"{line}\r\n" for line in lines).encode("latin-1"))

    orders = _orders(random_, departments)
    nights, sales, bad = [], [], []
    for number, (first, last) in enumerate(((0, _NIGHTS[0]), (25, _NIGHTS[1]))):
        own = [order for order in orders if first <= (order[2] - _FIRST_DAY).days < last]
        text, count = _night(own, number)
        path = folder / f"orders-{number + 1}.csv"
        path.write_bytes(text.encode("utf-8-sig" if number else "latin-1"))
        nights.append(path)
        sales.append(Counter(map(_sale, own)))
        bad.append(count)
    return Exports(
        catalogue,
        (nights[0], nights[1]),
        prices,
        departments,
        (sales[0], sales[1]),
        (bad[0], bad[1]),
    )


def _products(random_: random.Random) -> tuple[dict[str, str], dict[str, float], dict[str, str]]:
    """Titles, prices and departments by article number."""
    titles, prices, departments = {}, {}, {}
    for number in range(_PRODUCTS):
        sku = f"{20_000 + 7 * number}{'AB'[number % 2] if number % 3 == 0 else ''}"
        words = (random_.choice(_COLOURS), random_.choice(_WORDS), random_.choice(_WORDS))
        departments[sku] = DEPARTMENTS[number % len(DEPARTMENTS)]
        titles[sku] = " ".join((*words, departments[sku].upper(), str(number)))
        prices[sku] = round(random_.uniform(0.4, 14.0), 2)
    titles[sku] = ""  # the last has no name
    return titles, prices, departments


_Order = tuple[str, str, datetime, int]  # customer, article, local time, quantity


def _orders(random_: random.Random, departments: dict[str, str]) -> list[_Order]:
    """Orders of all customers in the order of time."""
    of = {name: [sku for sku, own in departments.items() if own == name] for name in DEPARTMENTS}
    orders: list[_Order] = []
    for number in range(_CUSTOMERS):
        customer = str(12_000 + number)
        liked = random_.sample(DEPARTMENTS, 2)
        for _ in range(random_.randrange(3, 8)):
            day = random_.randrange(_NIGHTS[1])
            at = _FIRST_DAY + timedelta(days=day, minutes=random_.randrange(480))
            for _ in range(random_.randrange(1, 7)):
                name = liked[0] if random_.random() < 0.8 else liked[1]
                quantity = random_.choice((1, 2, 6, 12, 48))
                orders.append((customer, random_.choice(of[name]), at, quantity))
        returned = orders[-1]
        orders.append((*returned[:2], returned[2] + timedelta(hours=1), -1))
    orders.append(("12000", "DOTCOM", _FIRST_DAY, 1))
    orders.extend(orders[10:20])  # lines that are there twice
    return sorted(orders, key=lambda order: order[2])


def _night(orders: list[_Order], number: int) -> tuple[str, int]:
    """Write one night's file, and count the rows in it that are bad."""
    lines = ["Invoice;CustomerNo;SKU;Qty;Order Date"]
    for place, (customer, sku, at, quantity) in enumerate(orders):
        lines.append(f"5{place:05};{customer};{sku};{quantity};{at:%d/%m/%Y %H:%M}")
    bad = [
        "700001;;20007;1;04/03/2025 10:00",  # nobody ordered it
        "700002;12001;20007;1;31/02/2025 10:00",  # a day that there is not
        '700003;12001;"20007;1;04/03/2025 10:00',  # the quote is not closed
        "700004;12001;20007;many;04/03/2025 10:00",
    ][number:]
    for place, line in enumerate(bad):
        lines.insert(2 + 9 * place, line)
    return "".join(f"{line}\r\n" for line in lines), len(bad)


def _sale(order: _Order) -> Sale:
    customer, sku, at, quantity = order
    micros = round(at.timestamp()) * 1_000_000
    weight = round(1 + math.log(abs(quantity)), 6)
    return Sale(customer, sku, "return" if quantity < 0 else "purchase", micros, weight)

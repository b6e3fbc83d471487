"""Exports of a shop, with the dirt that such files have, and the records that they mean.

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
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tests.support.shop_sales import LONDON, Order, Sales

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

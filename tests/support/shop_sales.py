"""Sales of two shops for exports: an invented wholesaler, and Online Retail."""

from __future__ import annotations

import csv
import io
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

from service.datasets.base import ReadProgress, open_compressed
from service.lab.public_data import RETAIL_FILE, OnlineRetail

LONDON = ZoneInfo("Europe/London")
DEPARTMENTS = ("Garden", "Kitchen", "Christmas", "Stationery", "Café", "Jewellery")
_WORDS = ("HEART", "LANTERN", "MUG", "RIBBON", "BIRD", "STAR", "BASKET", "CANDLE", "TIN", "CARD")
_COLOURS = ("RED", "WHITE", "BLUE", "PINK", "IVORY")
_PRODUCTS = 120
_CUSTOMERS = 90
_FIRST_CUSTOMER = 12_300
_FIRST_DAY = datetime(2025, 3, 3, 9, 0, tzinfo=LONDON)  # the clock changes on the 30th
_DAYS = 45

# The department of a product is that of the last of these words in its name.
_NOUNS = {
    "Garden": "GARDEN FLOWER PLANT POT WATERING BIRD RABBIT HERB SEED PARASOL TROWEL GARLAND",
    "Kitchen": "CAKE BAKING BOWL PLATE TIN JAR CUTLERY APRON JUG TRAY SPOON CASES CAKESTAND BOTTLE",
    "Christmas": "CHRISTMAS XMAS ADVENT BAUBLE SNOWFLAKE REINDEER SANTA",
    "Stationery": "CARD CARDS PAPER WRAP NOTEBOOK PEN PENCIL PENCILS TAPE RIBBON RIBBONS BOOK SET",
    "Café": "TEA COFFEE CUP MUG TEAPOT SAUCER TEACUP",
    "Jewellery": "NECKLACE BRACELET RING EARRINGS CHARM BEAD BANGLE BROOCH DIAMANTE",
    "Bags": "BAG BAGS PURSE SHOPPER",
    "Lights": "LIGHT LIGHTS T-LIGHT CANDLE CANDLES LANTERN LAMP HOLDER",
    "Decoration": "DECORATION HEART SIGN CLOCK FRAME MIRROR CUSHION HOOK HANGER DRAWER BOX BUNTING",
    "Toys": "TOY DOLL DOLLY GAME PUZZLE KIT SPACEBOY SKITTLES",
}
_DEPARTMENT = {word: name for name, words in _NOUNS.items() for word in words.split()}
_OTHER = "Various"


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


def invented(seed: int = 0) -> Sales:
    """Draw the sales of a wholesaler whose customers keep to one or two departments."""
    random_ = random.Random(seed)
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


def online_retail(folder: Path, customers: int | None = None, seed: int = 0) -> Sales:
    """Read the purchases of Online Retail (UCI 352; Chen, Sain and Guo 2012).

    The data have a price for each line: the price of a product is the one of most of its lines, the
    least of equals. They have neither stocks, which are drawn, nor departments, which are read from
    the names, and neither returns nor orders without a customer, which the exports add. Times are
    those of London. Postage and fees are ordered, but no products.

    Args:
        folder: has `purchases.csv.xz`.
        customers: that many by their numbers; all by default.
        seed: of the stocks.
    """
    random_ = random.Random(seed)
    titles = {item.item_id: item.title for item in OnlineRetail(folder).items() if not item.hidden}
    prices: defaultdict[str, Counter[float]] = defaultdict(Counter)
    orders = []
    with open_compressed(folder / RETAIL_FILE, ReadProgress()) as file:
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")):
            prices[row["item_id"]][float(row["unit_price"])] += 1
            at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=LONDON)
            orders.append(Order(row["user_id"], row["item_id"], at, int(row["quantity"])))
    if customers is not None:
        sample = set(sorted({order.customer for order in orders})[:customers])
        orders = [order for order in orders if order.customer in sample]
    products = []
    for sku, title in titles.items():
        price = min(prices[sku].items(), key=lambda each: (-each[1], each[0]))[0]
        name = title.upper()
        products.append(Product(sku, name, _department(name), price, random_.randrange(500)))
    orders.sort(key=lambda order: order.at)
    last = orders[-1].at.replace(hour=0, minute=0) + timedelta(days=1)
    nights = (last - timedelta(days=14), last - timedelta(days=7), last)
    return Sales(products, orders, nights)


def _department(title: str) -> str:
    """Return the department of the last noun of a name that has one."""
    known = [name for word in re.findall(r"[A-Z-]+", title) if (name := _DEPARTMENT.get(word))]
    return known[-1] if known else _OTHER

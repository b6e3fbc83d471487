"""Distances on the Earth, taken for a sphere of its mean radius."""

from __future__ import annotations

from math import asin, cos, degrees, pi, radians, sin

import numpy as np
from numpy.typing import NDArray

RADIUS = 6371.0088  # km, the mean of the Earth's (IUGG)
_DEGREE = radians(1) * RADIUS  # km for each degree of latitude
_SLACK = 1e-9  # degrees by which rounding may move a point out of its band of latitudes


def within(points: NDArray[np.complex128], lat: float, lon: float, km: float) -> NDArray[np.bool_]:
    """Mark the points [n] at most `km` from a place, bool [n]; NaN is no point.

    Points are latitude + longitude·i in degrees. The haversine is computed of those alone that are
    in the box of latitudes and longitudes around the circle.
    """
    reach = km / _DEGREE + _SLACK
    band: NDArray[np.bool_] = (points.real >= lat - reach) & (points.real <= lat + reach)
    at = np.flatnonzero(band)
    width = _longitudes(lat, km)
    if width < 180:
        apart = np.abs(points.imag.take(at) - lon)
        at = at[np.minimum(apart, 360 - apart) <= width + _SLACK]
    inside = np.zeros(len(points), np.bool_)
    bound = sin(min(km / RADIUS, pi) / 2) ** 2
    inside[at] = _haversines(points.take(at), lat, lon) <= bound
    return inside


def _longitudes(lat: float, km: float) -> float:
    """Return by how many degrees of longitude a point within `km` may differ; 180 near a pole."""
    angle = km / RADIUS
    if abs(radians(lat)) + angle >= pi / 2:
        return 180.0
    return degrees(asin(sin(angle) / cos(radians(lat))))


def distances(points: NDArray[np.complex128], lat: float, lon: float) -> NDArray[np.float64]:
    """Return the great-circle distances [n] in km, by the haversine formula (Sinnott 1984)."""
    haversines = np.minimum(_haversines(points, lat, lon), 1.0)
    found: NDArray[np.float64] = 2 * RADIUS * np.arcsin(np.sqrt(haversines))
    return found


def _haversines(points: NDArray[np.complex128], lat: float, lon: float) -> NDArray[np.float64]:
    """Return the squared sine of half of each angle [n] between a point and a place."""
    latitudes, longitudes = np.radians(points.real), np.radians(points.imag)
    a = np.sin((latitudes - radians(lat)) / 2) ** 2
    b = np.sin((longitudes - radians(lon)) / 2) ** 2
    found: NDArray[np.float64] = a + cos(radians(lat)) * np.cos(latitudes) * b
    return found

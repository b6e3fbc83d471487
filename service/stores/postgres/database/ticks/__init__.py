"""Ticks, by which versions only ever grow: their base, their horizon, and timelines."""

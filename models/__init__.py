"""Heed's computing: attention over memories. Arrays and bytes in, arrays and bytes out."""

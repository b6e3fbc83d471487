"""Commands that move data into and out of the store: import, undo, export.

Files and options come in; what was stored, refused and odd goes out to the terminal.
"""

"""One user's history as a memory: events, profile entries, and older events collapsed.

Events and a snapshot go in; a memory that targets attend over comes out.
"""

"""Explanations: the reasons that are named for a score, and the names of their events.

Scores, memories and event columns come in; contributions with ids and titles go out.
"""

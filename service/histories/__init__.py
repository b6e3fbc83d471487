"""Users held in RAM: their events, what the model computed from them, and one budget for both.

A requester and a snapshot go in; a `UserMemory` comes out.
"""

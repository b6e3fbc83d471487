"""Serving of the app by uvicorn: sockets, workers, and limits of connections.

In come the settings and the app; out goes a server that runs until it is stopped.
"""

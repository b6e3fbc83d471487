"""Access: which key a request has, what it permits, and how often it may be used.

In come requests and the keys of the store; out go requests with a key and a namespace in their
scope, or refusals.
"""

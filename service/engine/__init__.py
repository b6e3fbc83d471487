"""The jobs of the service as one object: write, answer, train, activate.

Queries of `service.domain` go in; answers of `service.domain` come out. No HTTP.
"""

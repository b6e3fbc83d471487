"""Measure a running service under load: `heed loadtest`.

In: the address of a service and `Options`. Out: a report as plain values, which `report` shows on
the terminal and as an HTML page. Of the rest of the service only `service.domain` is imported:
the load test sees a service as its clients do.
"""

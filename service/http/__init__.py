"""The HTTP interface: routes, schemas, limits, problem documents, telemetry and the page.

Requests go in; the engine answers; responses come out.
"""

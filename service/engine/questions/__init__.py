"""A file for each question: how its query is answered from one snapshot.

Queries of `service.domain` come in; answers go out.
"""

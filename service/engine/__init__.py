"""The service without HTTP: composition, answers, training jobs and model versions.

Queries of `service.domain` go in; answers of `service.domain` come out.
"""

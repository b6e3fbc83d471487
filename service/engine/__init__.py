"""The service without HTTP: composition, answers, training jobs and model versions.

Questions of `service.questions` go in, and its answers come out.
"""

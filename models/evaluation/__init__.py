"""Evaluation: splits, protocols, metrics, baselines and rankings of the whole catalogue.

A log and rankers go in; metrics with confidence intervals come out.
"""

"""Evaluations of models and of search on stored or public data, with their reports.

A data set or a store goes in; metrics and tables come out.
"""

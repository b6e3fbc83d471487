"""Admission: which requests are computed, in which order, and which are refused at once.

In: requests whose bodies have arrived. Out: their answers, or a refusal that says when to return.
"""

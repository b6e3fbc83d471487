"""The trained model: its configuration, its parts and its artifact.

Histories and targets go in; scores by part come out.
"""

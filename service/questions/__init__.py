"""Questions as clients send them and as the engine answers them, and their answers.

A body is validated once into a frozen model; filters in it become the conditions that are
evaluated.
"""

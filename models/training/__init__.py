"""Training: negatives, losses, stages, checkpoints and the fit of a whole model.

A log of interactions goes in; a trained recommender comes out.
"""

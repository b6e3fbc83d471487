"""Mathematics of ready questions: popularity, items taken together, audiences, affinities, rows.

Events, scores and contributions go in; ranked items, users and values come out.
"""

"""Imports of a forkserver, so that the processes which it forks need not compute it again.

The vectors of the text encoder are computed once a process.
"""

from models.text.encoders import StaticEncoder

StaticEncoder()

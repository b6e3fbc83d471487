"""What a forkserver imports, so that the processes which it forks need not compute it again.

Each is computed once a process: the vectors of the text encoder, and the number of rows from which
clusters are faster.
"""

from models.text.static_encoder import StaticEncoder
from service.histories import crossover

StaticEncoder()
crossover.measure()

"""The command line of the comparison with other systems, `make bench-peers`."""

from __future__ import annotations

import typer

from tests.benchmarks.__main__ import run
from tests.benchmarks.peers.recommend import recommend
from tests.benchmarks.peers.training import training

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure Heed beside RecTools' SASRec and implicit's ALS.",
)
app.command()(recommend)
app.command()(training)

if __name__ == "__main__":
    run(app)

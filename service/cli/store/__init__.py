"""Commands on the stored data itself: its check and salvage, and the ledger of forgotten users.

Comes in: arguments of the command line. Goes out: reports, and exit codes.
"""

"""Records that a store keeps beside the event log, each written once for every database."""

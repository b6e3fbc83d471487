"""Lending of connections to calls: a pool of each event loop, a deadline, a circuit breaker."""

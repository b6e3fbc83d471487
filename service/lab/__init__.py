"""Measurements that nothing serving imports: models, search and a running service under load."""

"""Collection rule: test_patroni_cluster.py takes a minute, and HEED_TEST_PATRONI asks for it."""

import os

collect_ignore = [] if os.environ.get("HEED_TEST_PATRONI") else ["test_patroni_cluster.py"]

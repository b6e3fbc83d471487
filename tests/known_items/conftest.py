"""Collection rule: test_pyvideo.py is collected only where PYVIDEO names its data."""

import os

collect_ignore = [] if os.environ.get("PYVIDEO") else ["test_pyvideo.py"]

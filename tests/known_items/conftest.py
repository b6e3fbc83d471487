"""What needs data that may not be kept here is collected where a folder with it is named."""

import os

collect_ignore = [] if os.environ.get("PYVIDEO") else ["test_pyvideo.py"]

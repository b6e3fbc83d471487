"""Routes: parsed requests go to the engine, its results go out as answers of the schemas.

`http/app.py` includes the router of each module; `http/openapi.py` lists the tags.
"""

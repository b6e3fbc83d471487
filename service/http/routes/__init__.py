"""Routes: parsed requests go to the engine, its results go out as answers of the schemas.

`service/http/app.py` includes the routers, `service/http/openapi.py` lists their tags, and `batch`
lists what a batch may ask.
"""

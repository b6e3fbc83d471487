"""Keys of the ASGI scope under which middlewares leave what those inside of them need."""

KEY = "heed.key"  # of every request: its `ApiKey`, or None without one
NAMESPACE = "heed.namespace"  # of every request: the namespace that it is about
ANONYMOUS = "heed.anonymous"  # of every request: keys are on, and it has none
SERVED = "heed.served"  # the namespace, which exists, that a request under /v1/ is about
OPENING = "heed.opening"  # the namespace that a request waits for until it is open
ROW = "heed.row"  # of every request: its `RouteRow`, or None if no route answers it
ENGINE = "heed.engine"  # of every request under /v1/
BODY = "heed.body"  # of every request but streams
BULK_TURN = "heed.bulk_turn"  # of a stream: a context that is entered for each batch
CLIENT = "heed.client"  # the `ClientConnection`, where the protocol knows of one
CROWDED = "heed.crowded"  # once all connections are in work: why a request is refused
DISCONNECTED = "heed.disconnected"  # of a request whose client has left
METHOD = "heed.method"  # of a HEAD request: its own method
REQUEST_ID = "heed.request_id"
STAGES = "heed.stages"

CLOSED_REQUEST = 499  # nginx's status for a client that closed its request; it is sent to nobody

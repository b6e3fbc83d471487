"""POST /v1/attend against the formulas of attention, written once more in float64 NumPy."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from models.text.encoders import StaticEncoder
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, item_id

Array = NDArray[np.float64]

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
ROWS = {"keys": [[1, 2]], "values": [[1]]}


def scores(query: Array, keys: Array, scorer: str) -> Array:
    """Scores [n] of one head: query [d], keys [n, d]."""
    if scorer == "additive":
        found: Array = np.tanh(query + keys).sum(1)
    elif scorer == "scaled_dot":
        found = keys @ query / np.sqrt(len(query))
    else:
        lengths = np.linalg.norm(keys, axis=1) * np.linalg.norm(query)
        found = keys @ query / np.where(lengths > 0, lengths, 1)  # a zero vector's cosine is 0
    return found


def attention(logits: Array, temperature: float, hard: bool) -> Array:
    """Return softmax weights [n]; a logit of -inf hides its row, and all hidden gives zeros."""
    weights: Array = np.zeros(len(logits))
    if not np.isfinite(logits).any():
        return weights
    if hard:
        weights[np.argmax(logits)] = 1.0
        return weights
    weights += np.exp((logits - logits.max()) / temperature)
    weights /= weights.sum()
    return weights


def reference(ask: dict[str, Any], keep: int | None = None) -> tuple[Array, Array, Array]:
    """Weights [H, n], context [v] and mass [H]; with `keep`, over the best rows of each head."""
    memory, heads = ask["memory"], ask.get("heads", 1)
    # The service reads what was written as float32.
    keys, values, query = (
        np.array(numbers, np.float32).astype(np.float64)
        for numbers in (memory["keys"], memory["values"], ask["query"]["vector"])
    )
    logits = np.stack(
        [
            scores(q, k, ask["scorer"]) + np.array(memory.get("bias", 0.0), np.float64)
            for q, k in zip(np.split(query, heads), np.split(keys, heads, axis=1), strict=True)
        ]
    )
    logits[:, ~np.array(memory.get("visible", [True] * len(keys)))] = -np.inf
    temperature, hard = ask.get("temperature", 1.0), ask.get("hard", False)
    mass = np.ones(heads)
    if keep is not None:
        for head in range(heads):
            full = attention(logits[head], temperature, hard)
            left_out = np.argsort(-logits[head], kind="stable")[keep:]
            logits[head, left_out] = -np.inf
            mass[head] = 1 - full[left_out].sum()
    weights = np.stack([attention(row, temperature, hard) for row in logits])
    parts = np.split(values, heads, axis=1)
    context = np.concatenate([w @ v for w, v in zip(weights, parts, strict=True)])
    return weights, context, mass


def dense(answer: dict[str, Any], n: int) -> Array:
    """The weights of an answer over all rows, [H, n]."""
    weights = np.zeros((len(answer["weights"]), n))
    weights[:, answer["rows"]] = answer["weights"]
    return weights


def question(seed: int, **given: Any) -> dict[str, Any]:
    """Return a random request over inline vectors; `given` overrides its fields."""
    random = np.random.default_rng(seed)
    heads = given.setdefault("heads", int(random.choice([1, 2, 4])))
    n = given.pop("n", int(random.choice([1, 2, 3, 40, 300])))
    d, v = (heads * int(random.integers(1, 5)) for _ in range(2))
    memory: dict[str, Any] = {
        "keys": np.round(random.normal(size=(n, d)), 3).tolist(),
        "values": np.round(random.normal(size=(n, v)), 3).tolist(),
    }
    if random.random() < 0.5:
        memory["bias"] = np.round(random.normal(size=n), 3).tolist()
    if random.random() < 0.5:
        memory["visible"] = (random.random(n) < 0.7).tolist()
    return {
        "memory": memory,
        "query": {"vector": np.round(random.normal(size=d), 3).tolist()},
        "temperature": float(random.choice([0.5, 1.0, 3.0])),
        "hard": bool(random.random() < 0.2),
        "limit": 1000,
    } | given


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON body of POST /v1/attend, which must succeed with 200."""
    answer = http.post("/v1/attend", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def vectors(untrained: Server) -> Any:
    """Yield a client of the untrained server, since inline vectors need no model."""
    with untrained.client() as client:
        yield client


@pytest.mark.parametrize("scorer", ["scaled_dot", "cosine", "additive"])
def test_vectors_are_attended_as_the_formula_says(vectors: httpx.Client, scorer: str) -> None:
    """Weights, context and mass equal the formula for any heads, mask, bias and temperature."""
    for seed in range(25):
        body = question(seed, scorer=scorer)
        found = ask(vectors, body)
        weights, context, mass = reference(body)
        np.testing.assert_allclose(dense(found, weights.shape[1]), weights, **CLOSE, err_msg=seed)
        np.testing.assert_allclose(found["context"], context, **CLOSE, err_msg=seed)
        np.testing.assert_allclose(found["mass"], mass, **CLOSE, err_msg=seed)
        assert (found["retrieval"], found["ids"], found["model_version"]) == ("exact", None, None)


@pytest.mark.parametrize("scorer", ["scaled_dot", "cosine", "additive"])
@pytest.mark.parametrize("heads", [1, 4])
def test_two_thousand_rows(vectors: httpx.Client, scorer: str, heads: int) -> None:
    """With `limit` the heaviest rows are listed in order, and the context covers all rows."""
    body = question(7, scorer=scorer, heads=heads, n=2_000, hard=False, limit=50)
    found = ask(vectors, body)
    weights, context, _ = reference(body)
    np.testing.assert_allclose(found["context"], context, **CLOSE)
    mean = weights.mean(0)
    rows = found["rows"]
    assert len(rows) == 50
    np.testing.assert_allclose(mean[rows], np.sort(mean)[::-1][:50], **CLOSE)
    np.testing.assert_allclose(found["weights"], weights[:, rows], **CLOSE)


@pytest.mark.parametrize(
    ("scorer", "k"),
    [("scaled_dot", 20), ("cosine", 20), ("scaled_dot", 300), ("cosine", 300), ("additive", 300)],
)
def test_coarse_attends_to_the_best_rows_and_reports_their_mass(
    vectors: httpx.Client, scorer: str, k: int
) -> None:
    """Coarse attention is the softmax over each head's best k rows, with their exact mass."""
    for seed in range(8):
        how = {"mode": "coarse", "k": k}
        body = question(seed, scorer=scorer, n=300, hard=False, retrieval=how)
        found = ask(vectors, body)
        weights, context, mass = reference(body, keep=k)
        np.testing.assert_allclose(dense(found, 300), weights, **CLOSE, err_msg=seed)
        np.testing.assert_allclose(found["context"], context, **CLOSE, err_msg=seed)
        np.testing.assert_allclose(found["mass"], mass, **CLOSE, err_msg=seed)
        assert found["retrieval"] == "coarse"
        assert k == 300 or max(found["mass"]) < 1


def test_a_tie_goes_to_the_lowest_row(vectors: httpx.Client) -> None:
    """Hard retrieval of equal keys is a lookup of the first."""
    for retrieval in ({"mode": "exact"}, {"mode": "coarse", "k": 2}):
        body = {
            "memory": {"keys": [[0], [1], [1], [1]], "values": [[1], [2], [3], [4]]},
            "query": {"vector": [1]},
            "hard": True,
            "retrieval": retrieval,
        }
        found = ask(vectors, body)
        assert (found["rows"], found["context"]) == ([1], [2.0])


def test_memory_without_visible_rows_gives_a_zero_context(vectors: httpx.Client) -> None:
    memories: list[dict[str, Any]] = [
        {"keys": [[1, 2]] * 3, "values": [[1, 1]] * 3, "visible": [False] * 3},
        {"keys": [], "values": []},
    ]
    for memory in memories:
        for mode in ("exact", "coarse"):
            body = {"memory": memory, "query": {"vector": [1, 2]}, "retrieval": {"mode": mode}}
            found = ask(vectors, body)
            assert (found["rows"], found["weights"]) == ([], [[]])
            assert not any(found["context"])


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"memory": {"user_id": "u0"}, "query": {"vector": [1, 2]}}, "/query/vector"),
        ({"memory": {"catalogue": True}, "query": {"vector": [1, 2]}}, "/query/vector"),
        ({"memory": {"catalogue": True}, "query": {"text": "x"}, "heads": 3}, "/heads"),
        ({"memory": {"user_id": "u0"}, "query": {"text": "x"}, "heads": 7}, "/heads"),
        ({"memory": ROWS, "query": {"vector": [1]}}, "/query/vector"),
        ({"memory": ROWS, "query": {"vector": [1, 2]}, "heads": 2}, "/heads"),
        ({"memory": ROWS, "query": {"vector": [1, 2]}, "heads": 3}, "/heads"),
        ({"memory": ROWS, "query": {"text": "x"}}, "/query"),
    ],
)
def test_mismatched_query_is_refused_with_a_pointer(
    http: httpx.Client, body: dict[str, Any], pointer: str
) -> None:
    """A query or number of heads that does not fit the memory is refused with 422."""
    answer = http.post("/v1/attend", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"].startswith(pointer)


def test_an_unknown_item_is_not_found(http: httpx.Client) -> None:
    """A query by an unknown item id is 404."""
    body = {"memory": {"catalogue": True}, "query": {"item_id": "nothing"}}
    assert http.post("/v1/attend", json=body).status_code == 404


# ------------------------------------------------------------------ the catalogue


def catalogue(http: httpx.Client) -> tuple[list[str], Array, Array]:
    """Return the item id, key and value of every text field of the listed items."""
    encoder = StaticEncoder()
    owners: list[str] = []
    keys: list[Array] = []
    values: list[Array] = []
    for item in http.get("/v1/items", params={"limit": 1000}).json()["items"]:
        named = (item["title"], item["description"], ", ".join(item["tags"]),
                 ", ".join(item["categories"]))  # fmt: skip
        texts = [text for text in named if text]
        if item["hidden"] or not texts:
            continue
        # Item vectors are kept in half precision.
        fields = encoder.encode(texts).astype(np.float16).astype(np.float64)
        owners += [item["item_id"]] * len(texts)
        keys += list(fields)
        values += [fields.sum(0) / np.linalg.norm(fields.sum(0))] * len(texts)
    return owners, np.array(keys), np.array(values)


@pytest.mark.parametrize("retrieval", [{"mode": "exact"}, {"mode": "coarse", "k": 1000}])
@pytest.mark.parametrize("text", ["rocket", "a king in a castle"])
def test_the_catalogue_is_a_memory(
    http: httpx.Client, text: str, retrieval: dict[str, Any]
) -> None:
    """Over the catalogue each text field is a key, with its item's vector as value."""
    owners, keys, values = catalogue(http)
    body = {
        "memory": {"catalogue": True},
        "query": {"text": text},
        "scorer": "cosine",
        "temperature": 0.2,
        "limit": 1000,
        "retrieval": retrieval,
    }
    found = ask(http, body)
    query = StaticEncoder().encode([text])[0].astype(np.float64)
    weights = attention(scores(query, keys, "cosine"), 0.2, hard=False)
    expected = dict.fromkeys(owners, 0.0)
    for owner, weight in zip(owners, weights, strict=True):
        expected[owner] += weight
    gathered = dict.fromkeys(owners, 0.0)
    for owner, weight in zip(found["ids"], found["weights"][0], strict=True):
        gathered[owner] += weight
    assert gathered == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(found["context"], weights @ values, **CLOSE)


def test_a_query_item_may_be_hidden_from_itself(http: httpx.Client) -> None:
    """With exclude_self its own rows are hidden from the query item, and from no later request."""
    item = item_id(0, 3)
    events = [{"user_id": "self", "item_id": item_id(0, n), "event_id": f"self-{n}"}
              for n in range(6)]  # fmt: skip
    assert http.post("/v1/events", json={"events": events}).status_code == 200
    for memory, own in (({"catalogue": True}, item), ({"user_id": "self"}, "self-3")):
        body = {"memory": memory, "query": {"item_id": item}, "limit": 1000}
        assert own in ask(http, body)["ids"]
        assert own not in ask(http, body | {"exclude_self": True})["ids"]
        assert own in ask(http, body)["ids"]


# ------------------------------------------------------------------ a user's memory


def test_a_user_is_a_memory(http: httpx.Client) -> None:
    """Mean weights over a user's memory equal the weights in the explanation of a score."""
    put = http.put("/v1/users/u6", json={"interests": [GENRES[3], item_id(1, 1)]})
    assert put.status_code == 200
    for how in ({}, {"temperature": 0.5}, {"hard": True}, {"retrieval": {"mode": "coarse"}}):
        target = item_id(2, 5)
        asked = {"user_id": "u6", "item_ids": [target], "explain": 50, "at": AT}
        scored = http.post("/v1/score", json=asked | how)
        explained = {
            row["event_id"] or row["item_id"] or row["title"]: row["weight"]
            for row in scored.json()["items"][0]["explanation"]
            if row["weight"] > 0  # what was not attended may still have been followed
        }
        body = {"memory": {"user_id": "u6"}, "query": {"item_id": target}, "at": AT}
        found = ask(http, body | how)
        means = np.mean(found["weights"], axis=0)
        assert dict(zip(found["ids"], means, strict=True)) == pytest.approx(explained, abs=1e-5)
        assert found["model_version"] == scored.json()["model_version"]
        if not how.get("hard"):
            assert {GENRES[3], item_id(1, 1)} < explained.keys()


def test_a_window_limits_a_users_memory(http: httpx.Client) -> None:
    """Only events that pass `visible` are attended; `until` is exclusive."""
    events = [
        {"user_id": "window", "item_id": item_id(0, n), "event_id": f"window-{n}",
         "type": "view" if n % 2 else "buy", "timestamp": f"2026-01-01T12:00:{10 + n}Z"}
        for n in range(6)
    ]  # fmt: skip
    assert http.post("/v1/events", json={"events": events}).status_code == 200
    for visible, seen in (
        ({"since": "2026-01-01T12:00:12Z", "until": "2026-01-01T12:00:14Z"}, {2, 3}),
        ({"types": ["buy"]}, {0, 2, 4}),
        ({"categories": ["odd"]}, {1, 3, 5}),
        ({"types": ["never"]}, set()),
    ):
        body = {
            "memory": {"user_id": "window"},
            "query": {"item_id": item_id(0, 0)},
            "visible": visible,
        }
        found = ask(http, body)
        assert set(found["ids"]) == {f"window-{n}" for n in seen}
        assert [row["event_id"] for row in found["events"]] == found["ids"]
        for row in found["events"]:
            event = events[int(row["event_id"][-1])]
            assert row | {"user_id": "window"} == event | {"title": row["title"]}
            assert row["title"]

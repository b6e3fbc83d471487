// Calls of the service by the types that openapi-typescript generates, as a user writes them.

import createClient from "openapi-fetch";
import type { components, paths } from "./heed.js";

type Filter = components["schemas"]["FilterIn"];

function check(holds: boolean): asserts holds {
  if (!holds) throw new Error("check failed");
}

export async function call(baseUrl: string): Promise<void> {
  const client = createClient<paths>({ baseUrl });
  const ids = ["oak", "ash", "elm"];
  const items = ids.map((item_id, cost) => ({ item_id, title: `${item_id} chair`, attributes: { cost } }));
  const stored = await client.POST("/v1/items", { body: { items: [...items, { item_id: "plain" }], update: true } });
  check(stored.data !== undefined && "created" in stored.data);
  check(stored.data.created.length === 4);

  const patched = await client.PATCH("/v1/items/{item_id}", {
    params: { path: { item_id: "elm" } },
    body: { title: null, attributes: { sold: true } },
  });
  check(patched.data?.title === "" && patched.data.attributes.sold === true);

  const appended = await client.POST("/v1/events", { body: { events: [{ user_id: "eve", item_id: "oak" }] } });
  check(appended.data?.stored === 1);

  const chairs: Filter = {
    all: [
      { field: "attributes.cost", in: [1, 2, null, "dear", true] },
      { any: [{ field: "attributes.cost", gte: 1, lt: 9 }, { field: "title", gt: "z" }] },
      { none: [{ field: "attributes.sold", exists: true }] },
    ],
  };
  const found = await client.POST("/v1/search", { body: { query: "chair", filter: chairs, user_id: "eve" } });
  check(found.data !== undefined && "items" in found.data);
  const names: string[] = found.data.items.map((item) => item.item_id);
  check(names.join() === "ash");

  const answer = await client.POST("/v1/recommend", {
    body: { user_id: "eve", limit: 1, rules: [{ name: "cheap", when: { field: "attributes.cost", eq: 0 }, boost: 1 }] },
  });
  check(answer.data?.items.length === 1);

  const scored = await client.POST("/v1/score", { body: { item_ids: ["ash"], user_id: "eve", explain: 2 } });
  const reasons = scored.data?.items[0]?.explanation ?? [];
  check(reasons.reduce((sum, reason) => sum + reason.weight, 0) > 0);

  const refused = await client.GET("/v1/items/{item_id}", { params: { path: { item_id: "none" } } });
  check(refused.error?.status === 404);
}

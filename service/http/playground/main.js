// The page: each tab is opened when it is first wanted.

import * as dialogs from "./lib/dialogs.js";
import { trouble } from "./lib/dom.js";
import * as fields from "./lib/fields.js";
import * as catalogue from "./catalogue/catalogue.js";
import * as explore from "./explore/explore.js";
import * as session from "./explore/session.js";
import * as models from "./models/models.js";
import * as people from "./people/people.js";
import * as scenarios from "./scenarios/scenarios.js";
import * as figures from "./shell/figures.js";
import * as key from "./shell/key.js";
import * as pulse from "./shell/pulse.js";
import * as tabs from "./shell/tabs.js";

addEventListener("submit", (event) => event.preventDefault()); // forms are sent by scripts
key.begin();
dialogs.begin();
pulse.begin();
figures.refresh();
figures.follow();
await fields.load().catch(trouble);
tabs.begin({ explore: explore.open, catalogue: catalogue.open, people: people.open, models: models.open, scenarios: scenarios.open });
session.onChange(pulse.soon);

// Models: train the next version, and choose among those that exist.

import { trouble } from "../lib/dom.js";
import { changed } from "../explore/session.js";
import * as figures from "../shell/figures.js";
import * as training from "./training.js";
import * as versions from "./versions.js";

let begun = false;

export function open() {
  if (!begun) training.begin(trained);
  begun = true;
  return Promise.all([versions.refresh(), training.refresh(trained)]).catch(trouble);
}

// What was published is served: everything that is shown is asked for anew.
const trained = () => Promise.all([open(), figures.refresh(), changed()]);

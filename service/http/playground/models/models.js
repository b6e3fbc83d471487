// Models: the versions with their figures, and which of them is served.

import { trouble } from "../lib/dom.js";
import { refresh } from "./versions.js";

export const open = () => refresh().catch(trouble);

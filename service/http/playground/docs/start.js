// Swagger UI over the document of this service, with the key that the page was given in this tab.

import { given } from "../shell/key.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // asks nobody else
  requestInterceptor: (request) => Object.assign(request, { headers: { ...request.headers, ...given() } }),
});

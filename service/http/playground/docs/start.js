// Swagger UI over the document of this service, with the key that the page was given in this tab.

import { given } from "../shell/key.js";

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // asks nobody else
  requestInterceptor: (request) => Object.assign(request, { headers: { ...request.headers, ...given() } }),
});

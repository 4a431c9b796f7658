// Changes go over HTTP with the CSRF token; errors come back as words for people.
const token = () => document.querySelector('[name="csrfmiddlewaretoken"]').value;

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function send(url, options) {
  let response;
  try {
    response = await fetch(url, { credentials: 'same-origin', ...options, headers: { 'X-CSRFToken': token(), ...options.headers } });
  } catch {
    throw new Refused('The server cannot be reached. Nothing was changed; try again.', 0);
  }
  if (response.ok) return response.status === 204 ? null : response.json();
  let message = `The server refused this (${response.status}). Load the page again and try once more.`;
  try { message = (await response.json()).error.message; } catch { /* not one of the server's own errors */ }
  throw new Refused(message, response.status);
}

// `version` is what the page showed; the server refuses when somebody changed it meanwhile.
// `why` stands in the history.
export function tune(changes, version, why = '') {
  const headers = { 'Content-Type': 'application/json' };
  if (version) headers['If-Match'] = `"${version}"`;
  return send(document.body.dataset.engine, { method: 'PATCH', headers, body: JSON.stringify(why ? { ...changes, why } : changes) });
}

export function killRequest(id) {
  return send(document.body.dataset.kill.replace('REQUEST', encodeURIComponent(id)), { method: 'POST' });
}

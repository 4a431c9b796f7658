// Sends one call of the API and shows its answer as it arrives, as text and nothing else.
const MOST_CHARS = 200_000;
const by = (id) => document.getElementById(id);
const endpoint = by('endpoint');
const body = by('body');
const answer = by('answer');
let running = null;

function choose() {
  const { method, body: example } = endpoint.selectedOptions[0].dataset;
  by('body-field').hidden = method === 'GET';
  body.value = example;
  complain('');
}

function complain(text) {
  by('body-error').textContent = text;
  by('body-error').hidden = !text;
}

function isJson(text) {
  try { JSON.parse(text); complain(''); return true; } catch (error) {
    complain(`This is no JSON: ${error.message}`);
    body.focus();
    return false;
  }
}

function setRunning(controller) {
  running = controller;
  by('send').disabled = running !== null;
  by('stop').disabled = running === null;
}

async function show(response, say) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let shown = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    if (shown < MOST_CHARS) answer.append(value.slice(0, MOST_CHARS - shown));
    shown += value.length;
    say();
  }
}

async function send(method) {
  const controller = new AbortController();
  const began = performance.now();
  const seconds = () => `${((performance.now() - began) / 1000).toFixed(1)} s`;
  setRunning(controller);
  answer.textContent = '';
  by('status').textContent = 'Waiting…';
  let head = '';
  try {
    const response = await fetch(endpoint.value, {
      method,
      signal: controller.signal,
      credentials: 'omit',
      headers: { Authorization: `Bearer ${by('key').value.trim()}`, 'Content-Type': 'application/json' },
      body: method === 'GET' ? undefined : body.value,
    });
    head = `${response.status} ${response.ok ? 'OK' : 'refused'}`;
    await show(response, () => { by('status').textContent = `${head} · arriving · ${seconds()}`; });
    by('status').textContent = `${head} · ${seconds()}`;
  } catch (error) {
    const stopped = error.name === 'AbortError';
    const why = stopped ? 'stopped' : 'the connection was lost or the key holds other than plain letters';
    by('status').textContent = [head, why, seconds()].filter(Boolean).join(' · ');
  } finally {
    setRunning(null);
  }
}

endpoint.addEventListener('change', choose);
by('stop').addEventListener('click', () => running?.abort());
by('call').addEventListener('submit', (event) => {
  event.preventDefault();
  const { method } = endpoint.selectedOptions[0].dataset;
  if (running === null && (method === 'GET' || isJson(body.value))) send(method);
});
choose();

// What each plot of the live page shows: columns of the samples, scale, words.
import { count, rate, seconds } from './words.js';

const last = (values) => values.at(-1) ?? null;
const share = (n) => `${Math.round(n)} %`;
const gib = (n) => `${n < 10 ? n.toFixed(1) : Math.round(n)} GiB`;
const ms = (n) => (n < 9.95 ? `${n.toFixed(1)} ms` : `${Math.round(n)} ms`);
const p50p95 = ([p50, p95]) => `p50 ${seconds(p50)} · p95 ${seconds(p95)}`;
const both = (words, names) => (values) => values.map((n, i) => (n === null ? null : `${names[i]} ${words(n)}`)).filter(Boolean).join(' · ');

export const SPECS = {
  decode: { columns: ['decode'], least: 50, fill: true, now: ([n]) => `${rate(n)} tok/s`, what: 'Tokens written a second' },
  prefill: { columns: ['prefill'], least: 50, fill: true, now: ([n]) => `${count(n)} tok/s`, what: 'Prompt tokens read a second' },
  ttft: { columns: ['ttft_p50', 'ttft_p95'], least: 1, labels: ['p50', 'p95'], now: p50p95, what: 'Time to first token' },
  itl: { columns: ['itl_p50', 'itl_p95'], least: 0.05, scale: 1000, unit: 'ms', labels: ['p50', 'p95'], now: p50p95, what: 'Time between two tokens' },
  queue: { columns: ['waiting'], least: 4, fill: true, step: true, whole: true, now: ([n]) => (n === 1 ? '1 request' : `${count(n)} requests`), what: 'Waiting requests' },
  kv: { columns: ['kv'], least: 100, most: 100, fill: true, now: ([n]) => share(n), what: 'KV memory in use' },
  preempted: { columns: ['preempted'], least: 4, fill: true, step: true, whole: true, now: ([n]) => `${rate(n)} a minute`, what: 'Preemptions a minute' },
  step: { columns: ['host_ms', 'forward_ms'], least: 10, labels: ['Python', 'model'], now: both(ms, ['Python', 'model']), what: 'Time of a step' },
  load: { columns: ['cpu', 'gpu'], least: 100, most: 100, labels: ['CPU', 'GPU'], now: both(share, ['CPU', 'GPU']), what: 'Load' },
  memory: { columns: ['memory', 'gpu_memory'], least: 1, labels: ['server', 'GPU'], now: both(gib, ['server', 'GPU']), what: 'Memory' },
};

// The plot's newest values in words.
export function nowWords(spec, series) {
  const values = series.map(last);
  return values[0] === null ? 'none yet' : spec.now(values);
}

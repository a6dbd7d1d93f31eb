// The look-up page. It inserts all data of the index as text, never as HTML.
"use strict";

const $ = id => document.getElementById(id);
let token = "";

async function post(body) {
  const headers = { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch("/query", { method: "POST", body: JSON.stringify(body), headers, signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw Object.assign(new Error((await answer.json().catch(() => ({}))).error ?? answer.statusText), { status: answer.status });
  return answer.json();
}

function row(values) {
  const made = document.createElement("tr");
  for (const [value, text] of values) {
    const cell = made.insertCell();
    cell.textContent = value;
    if (text) cell.className = "text";
  }
  return made;
}

async function ask(event) {
  event.preventDefault();
  const what = $("ask-kind").value, given = $("ask-values").value.split(/[\s,;[\]"]+/).filter(Boolean), said = $("ask-said");
  $("ask-table").hidden = true;
  if (!given.length) { said.textContent = "Enter at least one value."; return; }
  if (what === "tokens" && given.some(each => !/^\d+$/.test(each))) { said.textContent = "Token ids are integers."; return; }
  try {
    const { results, incomplete } = await post({ [what]: what === "tokens" ? given.map(Number) : given });
    const matches = results.flatMap(each => each.matches);
    said.textContent = (matches.length ? `${matches.length} ${matches.length === 1 ? "source holds" : "sources hold"} the prefix, at least in part.` : "No source holds the first block of the prompt.") +
      (incomplete.length ? ` These may hold more than the index knows: ${incomplete.map(each => each.source).join(", ")}.` : "");
    $("ask-found").replaceChildren(...matches.map(m => row([[m.source, true], [m.worker, true], [m.rank], [m.blocks], [m.tokens],
      [Object.entries(m.tiers).map(([tier, n]) => `${tier} ${n}`).join(", "), true], [m.partial ? `${m.state}, partial` : m.state, true]])));
    $("ask-table").hidden = !matches.length;
    $("sign-in").hidden = true;
  } catch (error) {
    $("sign-in").hidden = error.status !== 403;
    said.textContent = error.status === 403 ? `The index refuses to answer: ${error.message}` : `The question failed: ${error.message}`;
  }
}

function signIn(event) {
  token = $("sign-in-token").value.trim();
  $("sign-in-token").value = "";
  ask(event);
}

$("ask").addEventListener("submit", ask);
$("sign-in").addEventListener("submit", signIn);

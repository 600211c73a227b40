// The page of a Ziggurat server. Text of the catalogue is put in as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
const scores = new Intl.NumberFormat("en", { minimumFractionDigits: 4, maximumFractionDigits: 4 });
const MOST_WORDS = 12; // of a list that an item has
let info = null;
let lastRequest = null;

class ServerError extends Error {
  constructor(status, error) {
    super(error.expected);
    this.status = status;
    this.error = error;
  }
}

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers["X-Api-Key"] = byId("key").value;
  const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const data = await response.json();
  if (!response.ok) throw new ServerError(response.status, data.error);
  return data;
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return numbers.format(value);
  return Array.isArray(value) ? value.map(shown).join(", ") : String(value);
}

// ---- errors

const TITLES = { 401: "The server asks for a key", 503: "The server has no time", 500: "The server made a mistake" };

function showError(problem) {
  const box = byId("error");
  box.replaceChildren();
  box.hidden = false;
  if (!(problem instanceof ServerError)) {
    const text = problem instanceof SyntaxError ? "The columns are no JSON" : "The server did not answer";
    box.append(make("h2", text), make("p", problem.message));
    return;
  }
  box.append(make("h2", TITLES[problem.status] ?? "This cannot be answered"));
  const list = make("dl");
  for (const part of ["expected", "found", "where"]) {
    const text = problem.error[part];
    list.append(make("dt", part), make("dd", text, text.includes("\n") ? "lines" : "")); // it points at a column
  }
  for (const [place, way] of problem.error.ways_out.entries()) {
    list.append(make("dt", place ? "" : "ways out"), make("dd", way));
  }
  box.append(list);
}

async function guarded(work) {
  byId("error").hidden = true;
  try {
    await work();
  } catch (problem) {
    byId("status").textContent = "";
    showError(problem);
  }
}

// ---- what is asked

function user() {
  const columns = byId("columns").value.trim() ? JSON.parse(byId("columns").value) : {};
  const id = byId("user").value.trim();
  const names = info.user_columns.map((column) => column.name);
  const column = info.user_id || names.find((name) => /user|customer|visitor|member/i.test(name)) || names[0];
  return id && column ? { ...columns, [column]: id } : columns;
}

function request() {
  return {
    user: user(),
    k: Number(byId("k").value),
    filter: byId("filter").value.trim(),
    exclude_seen: byId("seen").checked,
    explain: byId("explain").checked,
  };
}

// ---- items

function nameOf(item) {
  const columns = item.columns ?? {};
  const title = Object.keys(columns).find((name) => /^(title|name|label)$/i.test(name));
  return title && columns[title] ? String(columns[title]) : item.id;
}

function aboutItem(item) {
  const line = make("div", undefined, "about");
  const name = nameOf(item);
  if (name !== item.id) line.append(`${item.id} `);
  for (const [column, value] of Object.entries(item.columns ?? {})) {
    if (value === null || String(value) === name || String(value) === item.id) continue;
    if (Array.isArray(value)) {
      for (const word of value.slice(0, MOST_WORDS)) line.append(make("span", shown(word), "tag"));
      if (value.length > MOST_WORDS) line.append(`and ${value.length - MOST_WORDS} more `);
    } else {
      const text = typeof value === "number" && Number.isInteger(value) ? String(value) : shown(value);
      line.append(`${column} ${text} `);
    }
  }
  return line;
}

function bar(share) {
  const track = make("span", undefined, "bar");
  track.append(make("span"));
  track.firstChild.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return track;
}

// The scores of one item; a bar is as long as the score is large among the items shown, from 0 where none is below 0.
function scoresOf(item, scales) {
  const box = make("div", undefined, "scores");
  for (const [name, { of, least, most }] of scales) {
    const value = of(item);
    if (value === undefined || value === null) continue;
    box.append(make("span", name), bar((value - least) / (most - least || 1)), make("span", scores.format(value), "number"));
  }
  return box;
}

function scalesOf(items) {
  const scales = new Map();
  const add = (name, of) => {
    const values = items.map(of).filter((value) => typeof value === "number");
    if (values.length) scales.set(name, { of, least: Math.min(0, ...values), most: Math.max(...values, 0) });
  };
  const tasks = [...new Set(items.flatMap((item) => Object.keys(item.tasks)))];
  const one = tasks.length === 1 && items.every((item) => item.tasks[tasks[0]] === item.score);
  if (!one) add("score", (item) => item.score);
  for (const task of tasks) add(task, (item) => item.tasks[task]);
  if (items.some((item) => item.retrieval !== undefined && item.retrieval !== item.score)) {
    add("retrieval", (item) => item.retrieval);
  }
  return scales;
}

function itemLine(item, place, scales) {
  const line = make("li");
  line.dataset.id = item.id;
  const text = make("div");
  text.append(make("div", nameOf(item), "name"), aboutItem(item));
  const button = make("button", "why?", "second small");
  button.type = "button";
  button.setAttribute("aria-label", `why ${nameOf(item)}?`);
  button.addEventListener("click", () => guarded(async () => {
    line.querySelector(".reason")?.remove();
    line.append(make("p", await reason(item.id), "reason"));
  }));
  line.append(make("span", place + 1, "rank"), text, scoresOf(item, scales), button);
  return line;
}

async function recommend() {
  const asked = request();
  byId("status").textContent = "Asking…";
  const began = performance.now();
  const answer = await call("recommend", asked);
  const took = performance.now() - began;
  lastRequest = asked;
  const found = answer.items.length ? (await call("items", { ids: answer.items.map((item) => item.id) })).items : [];
  const items = answer.items.map((item, place) => ({ ...item, columns: found[place].columns }));
  const scales = scalesOf(items);
  byId("items").replaceChildren(...items.map((item, place) => itemLine(item, place, scales)));
  byId("no-items").hidden = items.length > 0;
  byId("no-items").textContent = "No item passes. A wider filter, or an item's id below, says why.";
  byId("plan").hidden = !answer.plan;
  byId("plan").textContent = answer.plan ?? "";
  byId("version").textContent = answer.version;
  const effort = answer.degraded.length ? `less effort (${answer.degraded.join(", ")})` : "full effort";
  byId("status").textContent = `${items.length} items in ${took.toFixed(1)} ms, ${effort}`;
  byId("explanation").hidden = true;
  await showHistory(asked.user);
}

async function showHistory(of) {
  const { items } = await call("history", { user: of });
  byId("no-history").hidden = items.length > 0;
  byId("no-history").textContent = "Nothing is known of this user's past.";
  byId("history-facts").textContent = items.length ? `the latest ${items.length}` : "";
  byId("history").replaceChildren(...items.map((item) => {
    const line = make("li");
    line.append(make("div", nameOf(item), "name"), aboutItem(item));
    return line;
  }));
}

// ---- why

async function reason(id) {
  const answer = await call("explain", { request: lastRequest ?? request(), item: id });
  return answer.explanation;
}

async function explain() {
  byId("explanation").textContent = await reason(byId("item").value.trim());
  byId("explanation").hidden = false;
}

// ---- the start

async function begin() {
  const about = await call("info");
  const filters = Object.entries(about.filters).map(([name, kind]) => `${name} (${kind})`);
  byId("title").textContent = about.name || "Recommendations";
  byId("version").textContent = about.version;
  byId("about").textContent = [
    `${about.num_items.toLocaleString("en")} items`,
    about.published.number ? `version ${about.published.number}, window ${about.published.window}` : "",
    about.published.watermark ? `rows up to ${about.published.watermark}` : "",
    about.labels.length ? `scores for ${about.labels.join(", ")}` : "",
    about.value_model ? `ordered by ${about.value_model}` : "",
  ].filter(Boolean).join(" · ");
  byId("filters").textContent = filters.length
    ? `Attributes: ${filters.join(", ")}.` + (about.filter_example ? ` For example: ${about.filter_example}` : "")
    : "This export has no attributes to filter by.";
  byId("k").max = about.limits.max_k;
  byId("seen").checked = about.exclude_seen;
  const { users } = await call("users");
  byId("users").replaceChildren(...users.map((id) => Object.assign(make("option"), { value: id })));
  if (users.length && !byId("user").value) byId("user").value = users[0];
  if (!about.can_recommend) {
    for (const id of ["ask", "columns-of-page"]) byId(id).hidden = true;
    byId("about").textContent += " · it ranks items that a request names: POST /rank, see the OpenAPI description";
  }
  info = about;
}

function onSubmit(form, work) {
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(async () => {
      if (info === null) await begin();
      await work();
    });
  });
}

onSubmit("ask", recommend);
onSubmit("why", explain);
guarded(async () => {
  await begin();
  if (info.can_recommend) await recommend();
});

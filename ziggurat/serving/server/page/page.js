// The page of a Ziggurat server. Text of the catalogue is put in as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
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

function fill(table, columns, rows) {
  while (table.tBodies.length) table.tBodies[0].remove();
  table.tHead?.remove();
  const head = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = make("th", column.name, column.number ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const column of columns) {
      const value = column.of(row);
      const cell = make("td", value instanceof Node ? undefined : shown(value), column.number ? "number" : "text");
      if (value instanceof Node) cell.append(value);
      line.append(cell);
    }
  }
}

function showError(problem) {
  const box = byId("error");
  box.replaceChildren();
  box.hidden = false;
  if (!(problem instanceof ServerError)) {
    box.append(make("p", `The server did not answer: ${problem.message}`));
    return;
  }
  const list = make("dl");
  for (const part of ["expected", "found", "where"]) {
    list.append(make("dt", part), make("dd", problem.error[part]));
  }
  list.append(make("dt", "ways out"));
  for (const way of problem.error.ways_out) list.append(make("dd", way));
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

function userColumn() {
  const names = info.user_columns.map((column) => column.name);
  return info.user_id ?? names.find((name) => /user|customer|visitor|member/i.test(name)) ?? names[0];
}

function user() {
  const columns = byId("columns").value.trim() ? JSON.parse(byId("columns").value) : {};
  const id = byId("user").value.trim();
  return id && info.user_columns.length ? { ...columns, [userColumn()]: id } : columns;
}

function columnsOfItems(rows) {
  const names = [];
  for (const row of rows) {
    for (const name of Object.keys(row.columns ?? {})) if (!names.includes(name)) names.push(name);
  }
  return names.map((name) => ({ name, of: (row) => row.columns?.[name] }));
}

function whyButton(id) {
  const button = make("button", "why?", "small");
  button.type = "button";
  button.setAttribute("aria-label", `why item ${id}?`);
  button.addEventListener("click", () => {
    byId("item").value = id;
    guarded(explain);
  });
  return button;
}

async function recommend() {
  const request = {
    user: user(),
    k: Number(byId("k").value),
    filter: byId("filter").value.trim(),
    exclude_seen: byId("seen").checked,
    explain: byId("explain").checked,
  };
  byId("status").textContent = "Asking…";
  const began = performance.now();
  const answer = await call("recommend", request);
  const took = performance.now() - began;
  lastRequest = request;
  const details = await Promise.all(answer.items.map((item) => call(`items/${encodeURIComponent(item.id)}`).catch(() => ({}))));
  const rows = answer.items.map((item, place) => ({ ...item, place: place + 1, columns: details[place].columns }));
  const tasks = [...new Set(rows.flatMap((row) => Object.keys(row.tasks)))];
  fill(byId("items"), [
    { name: "#", number: true, of: (row) => row.place },
    { name: "id", of: (row) => row.id },
    ...columnsOfItems(rows),
    { name: "score", number: true, of: (row) => row.score },
    ...tasks.map((task) => ({ name: task, number: true, of: (row) => row.tasks[task] })),
    ...(rows.some((row) => row.retrieval !== undefined)
      ? [{ name: "retrieval", number: true, of: (row) => row.retrieval }]
      : []),
    { name: "", of: (row) => whyButton(row.id) },
  ], rows);
  const effort = answer.degraded.length ? `with less effort (${answer.degraded.join(", ")})` : "with full effort";
  const notes = (answer.notes ?? []).map((note) => ` Filter: ${note}.`).join("");
  byId("facts").textContent = `Version ${answer.version}, ${effort}.${notes}`;
  byId("plan").hidden = !answer.plan;
  byId("plan").textContent = answer.plan ?? "";
  byId("status").textContent = `${rows.length} items in ${took.toFixed(1)} ms.`;
  await showHistory(request.user);
}

async function showHistory(of) {
  const { items } = await call("history", { user: of });
  byId("no-history").textContent = items.length ? "" : "Nothing is known of this user's past.";
  fill(byId("history"), [{ name: "id", of: (row) => row.id }, ...columnsOfItems(items)], items);
}

async function explain() {
  if (lastRequest === null) lastRequest = { user: user(), filter: byId("filter").value.trim() };
  const answer = await call("explain", { request: lastRequest, item: byId("item").value.trim() });
  byId("explanation").textContent = answer.explanation;
}

async function begin() {
  info = await call("info");
  const filters = Object.entries(info.filters).map(([name, kind]) => `${name} (${kind})`);
  byId("about").textContent =
    `${info.name}, version ${info.version}: ${numbers.format(info.num_items)} items` +
    (info.labels.length ? `, scores for ${info.labels.join(", ")}` : "") +
    (info.value_model ? `, ordered by ${info.value_model}` : "") + ".";
  byId("filters").textContent = filters.length
    ? `Attributes: ${filters.join(", ")}.` + (info.filter_example ? ` For example: ${info.filter_example}` : "")
    : "This export has no attributes to filter by.";
  byId("k").max = info.limits.max_k;
  const { users } = await call("users");
  byId("users").replaceChildren(...users.map((id) => Object.assign(make("option"), { value: id })));
  if (users.length) byId("user").value = users[0];
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded(async () => {
    if (info === null) await begin();
    await recommend();
  });
});
byId("why").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded(async () => {
    if (info === null) await begin();
    await explain();
  });
});
guarded(begin);

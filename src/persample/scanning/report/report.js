"use strict";
// The page is readable without this script. It adds sorting, filtering and the details of single examples.
(() => {
  const byId = (id) => document.getElementById(id);
  const isNarrow = matchMedia("(max-width: 860px)").matches;
  if (isNarrow) byId("more").open = false;

  // ---- table: sorting and filtering ----

  const table = byId("table");
  if (table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const text = byId("filter-text");
    const choice = byId("filter-class");
    const searchTexts = new Map(
      rows.map((row) => [row, [...row.querySelectorAll("[data-search]")].map((c) => c.textContent).join(" ").toLowerCase()])
    );

    const perPage = isNarrow ? 10 : 25;
    let current = 0; // page

    const filter = (to = 0) => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((row) => {
        const matches = words.every((word) => searchTexts.get(row).includes(word));
        return matches && (!choice || choice.value === "" || row.dataset.class === choice.value);
      });
      const count = found.length;
      const last = Math.max(0, Math.ceil(count / perPage) - 1);
      current = Math.min(last, Math.max(0, to));
      const shown = new Set(found.slice(current * perPage, (current + 1) * perPage));
      for (const row of rows) row.hidden = !shown.has(row);
      byId("pages").hidden = last === 0;
      byId("page-number").textContent = `Page ${current + 1} of ${last + 1}`;
      byId("previous").disabled = current === 0;
      byId("next").disabled = current === last;
      table.parentElement.hidden = count === 0;
      byId("no-rows").hidden = count !== 0;
      byId("count").textContent = `${count} of ${rows.length} suspects shown`;
    };

    const sort = (head) => {
      const numeric = head.dataset.kind === "number";
      const first = head.dataset.first || "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const direction = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const value = (row) => row.cells[head.cellIndex].dataset.v || "";
      rows.sort((a, b) => {
        const [one, two] = [value(a), value(b)];
        if (one === "" || two === "") return (one === "") - (two === ""); // missing values come last in both directions
        return sign * (numeric ? Number(one) - Number(two) : one.localeCompare(two, "en", { numeric: true }));
      });
      body.append(...rows);
      filter();
    };

    heads.forEach((head) => head.querySelector("button")?.addEventListener("click", () => sort(head)));
    text.addEventListener("input", () => filter());
    choice?.addEventListener("change", () => filter());
    byId("previous").addEventListener("click", () => filter(current - 1));
    byId("next").addEventListener("click", () => filter(current + 1));
    document.querySelectorAll('input[name="marks"]').forEach((one) => {
      one.addEventListener("change", () => {
        document.querySelector("main").setAttribute("data-marks", one.value);
        byId("marks-meaning").textContent = one.parentElement.title;
      });
    });
    text.form.addEventListener("submit", (event) => event.preventDefault());
    const showAll = () => {
      text.value = "";
      if (choice) choice.value = "";
      filter();
    };
    byId("clear").addEventListener("click", () => {
      showAll();
      text.focus();
    });
    const reveal = (event) => {
      const link = event.target.closest('a[href^="#example-"]');
      const row = link && byId(link.getAttribute("href").slice(1));
      if (!row?.hidden) return;
      showAll(); // a hidden row cannot be scrolled to
      filter(Math.floor(rows.indexOf(row) / perPage));
    };
    byId("jump")?.addEventListener("click", reveal);
    body.addEventListener("click", reveal);
    text.form.hidden = false;
    filter();
  }

  // ---- scatter plot: details of the selected example ----

  const plot = byId("plot");
  if (plot) {
    const points = JSON.parse(byId("points").textContent);
    const circles = [...plot.querySelectorAll(".points circle")];
    const positions = circles.map((circle) => [parseFloat(circle.getAttribute("cx")), parseFloat(circle.getAttribute("cy"))]);
    const marker = byId("marker");
    const isShown = (i) => !circles[i].classList.contains("faded");
    const order = (axis, sign) => circles.map((_, i) => i).sort((a, b) => sign * (positions[a][axis] - positions[b][axis]) || a - b);
    const orders = { x: order(0, 1), y: order(1, -1) };
    const first = points.length - 1; // the first suspect is drawn last
    let current = -1;

    const showPreview = (point) => {
      const own = point.rank && byId(`example-${point.id}`)?.querySelector(".preview");
      let preview = null;
      if (own) {
        preview = own.cloneNode(true);
      } else if (point.preview) {
        const [kind, content, tiny] = point.preview;
        preview = document.createElement(kind === "image" ? "img" : "span");
        preview.className = `preview ${kind === "image" ? (tiny ? "tiny" : "") : kind}`;
        if (kind === "image") {
          preview.src = content;
          preview.alt = `Example ${point.id}`;
        } else {
          preview.textContent = content;
        }
      }
      byId("stage").hidden = !preview || preview.classList.contains("nothing");
      byId("stage").replaceChildren(...(preview ? [preview] : []));
    };

    const select = (i, announce) => {
      if (i < 0) return;
      current = i;
      const point = points[i];
      marker.setAttribute("cx", `${positions[i][0]}%`);
      marker.setAttribute("cy", `${positions[i][1]}%`);
      showPreview(point);
      const facts = [["Id", point.id], ["Label", point.label], ["Loss", point.loss], ["Gradient norm", point.norm], ["Suspect", point.rank && `no. ${point.rank}`]];
      const known = facts.filter(([, value]) => value !== undefined);
      byId("known").replaceChildren(
        ...known.flatMap(([name, value]) => [["dt", name], ["dd", value]]).map(([tag, content]) => {
          const element = document.createElement(tag);
          element.textContent = content;
          return element;
        })
      );
      byId("known-note").hidden = !point.note;
      byId("known-note").textContent = point.note || "";
      byId("jump").hidden = !point.rank;
      byId("jump").firstElementChild.href = point.rank ? `#example-${point.id}` : "#suspects";
      if (announce) {
        const words = known.map(([name, value]) => `${name} ${value}`);
        byId("spoken").textContent = [...words, point.note].filter(Boolean).join(", ");
      }
    };

    const findNearest = (event) => {
      const box = plot.getBoundingClientRect();
      let [best, least] = [-1, 28 * 28];
      positions.forEach(([x, y], i) => {
        const across = box.left + (x / 100) * box.width - event.clientX;
        const up = box.top + (y / 100) * box.height - event.clientY;
        const distance = across * across + up * up;
        if (distance <= least && isShown(i)) [best, least] = [i, distance]; // of circles at the same position, the last one is on top
      });
      return best;
    };

    const step = (axis, by) => {
      const shown = orders[axis].filter(isShown);
      if (!shown.length) return -1;
      const at = shown.indexOf(current);
      return at < 0 ? shown[0] : shown[Math.min(shown.length - 1, Math.max(0, at + by))];
    };

    const keys = {
      ArrowRight: () => step("x", 1),
      ArrowLeft: () => step("x", -1),
      ArrowUp: () => step("y", 1),
      ArrowDown: () => step("y", -1),
      PageUp: () => step("y", 25),
      PageDown: () => step("y", -25),
      Home: () => first,
    };

    plot.addEventListener("pointermove", (event) => select(findNearest(event), false));
    plot.addEventListener("pointerdown", (event) => select(findNearest(event), false));
    plot.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      select(keys[event.key](), true);
    });
    byId("detail").hidden = byId("hint").hidden = false;
    select(first, false);

    // ---- legend: show only the selected classes ----

    const selected = new Set();
    byId("legend")?.querySelectorAll("li[data-class]").forEach((item) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...item.childNodes);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const own = item.dataset.class;
        if (!selected.delete(own)) selected.add(own);
        button.setAttribute("aria-pressed", String(selected.has(own)));
        circles.forEach((circle) => circle.classList.toggle("faded", selected.size > 0 && !selected.has(circle.dataset.class)));
      });
      item.replaceChildren(button);
    });
  }

  // ---- triage: decisions about the suspects ----

  const section = byId("triage");
  if (section) {
    const { key, items, classes, decisions, served, previews } = JSON.parse(byId("items").textContent);
    const gallery = byId("gallery");
    const perPage = isNarrow ? 12 : 30;
    const words = { accept: "a", keep: "k", relabel: "l", remove: "r", unsure: "u" };
    const itemById = new Map(items.map((item) => [item.id, item]));
    const decided = new Map(Object.entries(decisions).map(([id, one]) => [Number(id), one]));
    const history = []; // of pairs of an id and the decision before
    let page = 0;
    let current = 0; // place in the chosen items
    let chosen = items;

    const make = (tag, options = {}, ...children) => {
      const element = Object.assign(document.createElement(tag), options);
      element.append(...children);
      return element;
    };

    // ---- where decisions are kept ----

    const place = `persample-review-${key}`;
    const complain = (text) => {
      byId("review-error").textContent = text;
      byId("review-error").hidden = !text;
    };
    const send = async (body) => {
      try {
        const answer = await fetch("decisions", { method: "POST", headers: { "content-type": "application/json" }, body });
        complain(answer.ok ? "" : `The decision was not stored: ${await answer.text()}`);
      } catch {
        complain("The decision was not stored: the server does not answer. Download fixes.csv to keep your decisions.");
      }
    };
    let sent = Promise.resolve(); // one after the other, so that the last one counts
    const store = (id) => {
      if (served) {
        const one = decided.get(id);
        const body = JSON.stringify({ id, word: one?.word ?? null, label: one?.label ?? "" });
        sent = sent.then(() => send(body));
        return;
      }
      try {
        localStorage.setItem(place, JSON.stringify([...decided]));
      } catch {
        complain("This browser keeps nothing for this page: download fixes.csv before you close it.");
      }
    };
    if (!served) {
      try {
        JSON.parse(localStorage.getItem(place) || "[]").forEach(([id, one]) => decided.set(id, one));
      } catch {
        // nothing was kept
      }
    }

    // ---- cards ----

    const pairOf = (item) => JSON.stringify([item.given, item.new]);
    const namePair = (item) => (item.new ? `${item.given || "no label"} → ${item.new}` : item.given || "Examples");
    const counts = new Map();
    items.forEach((item) => counts.set(pairOf(item), (counts.get(pairOf(item)) || 0) + 1));

    const fillShot = async (shot, item) => {
      const own = byId(`example-${item.id}`)?.querySelector(".preview");
      if (own && !own.classList.contains("nothing")) return void shot.append(own.cloneNode(true));
      if (!previews) return void shot.append(make("span", { className: "preview nothing", textContent: "–" }));
      const answer = await fetch(`preview/${item.id}`);
      const { kind, content, tiny, panels } = answer.ok ? await answer.json() : { kind: "text", content: "no preview" };
      const picture = (source, title) => make("img", { className: tiny ? "preview tiny" : "preview", src: source, alt: `Example ${item.id}${title ? `, ${title}` : ""}` });
      if (kind === "image") shot.append(picture(content));
      else if (kind === "panels") shot.append(make("span", { className: "preview panels" }, ...panels.map(([title, source]) => picture(source, title))));
      else shot.append(make("span", { className: `preview ${kind}`, textContent: content ?? "–" }));
    };

    const offers = (item) => Object.keys(words).filter((word) => (word === "accept" ? item.new && classes.length : word !== "relabel" || classes.length));

    const makeCard = (item) => {
      const card = make("article", { className: "card", tabIndex: -1 });
      card.dataset.id = item.id;
      card.setAttribute("role", "listitem");
      const shot = make("div", { className: "shot" });
      const labels = make("p", { className: "labels" }, item.text ?? item.given);
      if (item.new) labels.append(" → ", make("b", { textContent: item.new }), make("small", { textContent: ` ${item.sure}` }));
      const choices = make("p", { className: "choices" });
      offers(item).forEach((word) => {
        const button = make("button", { type: "button", textContent: word, tabIndex: -1, title: `${word}${word === "accept" ? ` ${item.new}` : ""} (${words[word]})` });
        button.dataset.word = word;
        button.addEventListener("click", () => act(item, word));
        choices.append(button);
      });
      const who = make("p", { className: "who", title: item.name ?? "" }, make("b", { textContent: item.id }), ` ${item.name ?? ""}`);
      card.append(shot, labels, who);
      if (item.note) card.append(make("p", { className: "who", textContent: item.note, title: item.note }));
      card.append(choices);
      card.addEventListener("focus", () => (current = chosen.indexOf(item)));
      fillShot(shot, item).catch(() => shot.append("no preview"));
      show(card, item);
      return card;
    };

    const show = (card, item) => {
      const one = decided.get(item.id);
      card.dataset.word = one?.word ?? "";
      card.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.word === one?.word)));
      const text = one ? (one.label ? `${one.word}: ${one.label}` : one.word) : "undecided";
      card.setAttribute("aria-label", `Example ${item.id}, ${namePair(item)}, ${text}`);
    };

    const findCard = (item) => gallery.querySelector(`[data-id="${item?.id}"]`);

    const count = () => {
      const done = items.filter((item) => decided.has(item.id)).length;
      byId("progress").value = done / items.length;
      byId("decided").textContent = `${done} of ${items.length} decided`;
      byId("undo").disabled = !history.length;
    };

    const draw = () => {
      const last = Math.max(0, Math.ceil(chosen.length / perPage) - 1);
      page = Math.min(last, Math.max(0, page));
      let before = null;
      const elements = [];
      for (const item of chosen.slice(page * perPage, (page + 1) * perPage)) {
        if (pairOf(item) !== before) elements.push(make("h3", { textContent: namePair(item) }, make("small", { textContent: counts.get(pairOf(item)) })));
        before = pairOf(item);
        elements.push(makeCard(item));
      }
      gallery.replaceChildren(...elements);
      const first = gallery.querySelector(".card");
      if (first) first.tabIndex = 0;
      byId("gallery-pages").hidden = last === 0;
      byId("gallery-number").textContent = `Page ${page + 1} of ${last + 1}`;
      byId("gallery-previous").disabled = page === 0;
      byId("gallery-next").disabled = page === last;
      count();
    };

    const move = (to) => {
      if (!chosen.length) return;
      current = Math.min(chosen.length - 1, Math.max(0, to));
      const wanted = Math.floor(current / perPage);
      if (wanted !== page) {
        page = wanted;
        draw();
      }
      gallery.querySelectorAll('.card[tabindex="0"]').forEach((card) => (card.tabIndex = -1));
      const card = findCard(chosen[current]);
      card.tabIndex = 0;
      card.focus();
    };

    // ---- decisions ----

    const set = (item, one, keepsHistory = true) => {
      if (keepsHistory) history.push([item.id, decided.get(item.id)]);
      if (one) decided.set(item.id, one);
      else decided.delete(item.id);
      const card = findCard(item);
      if (card) show(card, item);
      count();
      store(item.id);
    };

    const moveOn = (item) => {
      const at = chosen.indexOf(item);
      const next = chosen.findIndex((one, i) => i > at && !decided.has(one.id));
      move(next < 0 ? Math.min(at + 1, chosen.length - 1) : next);
    };

    const act = (item, word) => {
      if (word === "relabel") return relabel(item);
      set(item, { word, label: word === "accept" ? item.new : "" });
      moveOn(item);
    };

    const relabel = (item) => {
      const card = findCard(item);
      if (card.querySelector("select")) return;
      const list = make("select", { ariaLabel: `New label of example ${item.id}` }, make("option", { textContent: "new label", value: "" }));
      classes.filter((name) => name !== item.given).forEach((name) => list.append(make("option", { textContent: name, value: name })));
      const close = () => list.remove();
      list.addEventListener("change", () => {
        close();
        set(item, { word: "relabel", label: list.value });
        moveOn(item);
      });
      list.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Escape") {
          close();
          card.focus();
        }
      });
      card.append(list);
      list.focus();
    };

    const undo = () => {
      const last = history.pop();
      if (!last) return;
      const item = itemById.get(last[0]);
      set(item, last[1], false);
      if (!chosen.includes(item)) choose("");
      move(chosen.indexOf(item));
    };

    const countInRow = () => {
      const cards = [...gallery.querySelectorAll(".card")];
      return Math.max(1, cards.filter((card) => card.offsetTop === cards[0].offsetTop).length);
    };
    const moves = { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: countInRow, ArrowUp: () => -countInRow(), PageDown: () => perPage, PageUp: () => -perPage };
    gallery.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const item = chosen[current];
      const word = Object.keys(words).find((one) => words[one] === event.key.toLowerCase());
      if (moves[event.key]) move(current + moves[event.key]());
      else if (event.key.toLowerCase() === "z") undo();
      else if (word && item && offers(item).includes(word)) act(item, word);
      else return;
      event.preventDefault();
    });

    // ---- choice of a pair, pages, download ----

    const choose = (pair) => {
      byId("pair").value = pair;
      chosen = pair === "" ? items : pair === "undecided" ? items.filter((item) => !decided.has(item.id)) : items.filter((item) => pairOf(item) === pair);
      [page, current] = [0, 0];
      draw();
    };
    byId("pair").append(make("option", { value: "", textContent: "all suspects" }), make("option", { value: "undecided", textContent: "undecided" }));
    new Map(items.map((item) => [pairOf(item), item])).forEach((item, pair) => byId("pair").append(make("option", { value: pair, textContent: `${namePair(item)} (${counts.get(pair)})` })));
    byId("pair").addEventListener("change", () => choose(byId("pair").value));
    byId("gallery-previous").addEventListener("click", () => move((page - 1) * perPage));
    byId("gallery-next").addEventListener("click", () => move((page + 1) * perPage));
    byId("undo").addEventListener("click", undo);

    const isFormula = (text) => /^[=+\-@\t\r\n]/.test(text) && !/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text);
    const cell = (value) => {
      const text = isFormula(String(value)) ? `'${value}` : String(value);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const makeFixes = () => {
      const fixes = items.filter((item) => decided.has(item.id));
      const rows = fixes.map((item) => {
        const { word, label } = decided.get(item.id);
        const fixed = word === "remove" ? "remove" : ["accept", "relabel"].includes(word) ? label : "";
        return [item.id, item.key ?? "", item.name ?? "", item.given, item.new, word, fixed];
      });
      return [["id", "key", "name", "given", "suggested", "decision", "new_label"], ...rows].map((row) => row.map(cell).join(",") + "\r\n").join("");
    };
    byId("download").addEventListener("click", () => {
      const address = URL.createObjectURL(new Blob([makeFixes()], { type: "text/csv" }));
      make("a", { href: address, download: "fixes.csv" }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    });

    section.hidden = false;
    choose("");
    if (served) {
      fetch("decisions") // they may be newer than the page
        .then((answer) => answer.json())
        .then((stored) => {
          decided.clear();
          Object.entries(stored).forEach(([id, one]) => decided.set(Number(id), one));
          draw();
        })
        .catch(() => complain("The stored decisions cannot be read."));
    }
  }

  // ---- commands to copy ----

  document.querySelectorAll(".copy").forEach((button) => {
    const code = button.previousElementSibling;
    button.hidden = false;
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(code); // if the browser does not let a page write, the user can
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
    });
  });
})();

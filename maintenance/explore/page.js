"use strict";
// The page of docs/explore.html. All text comes from the data, and is set as text: nothing is read as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIXED = 0, CANNOT_RUN = 2;
  const NO_TE = -1;
  const PAGE_ENDING = document.documentElement.dataset.pageEnding;  // ".md"; "/" on the site
  const KINDS = {
    silent: ["Silent", "Numbers are wrong, and nothing says so."],
    crash: ["Crashes", "The run ends."],
    hang: ["Hangs", "The run stands still."],
    memory: ["Memory and time", "It takes more than it needs."],
    missing: ["Missing", "The release lacks what others have."],
  };
  const WORDS = data.words.flatMap(([, words]) => words.map(([word]) => word));
  const at = (id) => document.getElementById(id);

  // words: a set, or null for "everything"
  const choice = { core: 0, te: 0, words: null };
  const opened = new Set();

  // ---- what a choice means ----

  function span(first, count, place) {
    return place >= first && place < first + count;
  }

  function stateOf(patch, core, te) {
    const [first, second] = patch.by;
    if (first === 0 && second === undefined) return patch.states[0][core];
    if (te === NO_TE) return "n";
    return first === 1 ? patch.states[0][te] : patch.states[core][te];
  }

  const applies = (state) => state >= "A" && state <= "Z";

  function runOn(proof, core) {
    const run = proof.runs.find(([first, count]) => span(first, count, core));
    return run && { verdict: run[2], stock: data.texts[run[3]], shim: data.texts[run[4]] };
  }

  // What a proof has shown for this pair of releases: numbers, or why there are none; null if the proof is not about it.
  // A result that depends on Transformer Engine is that of the pair it was measured on. If this is another pair, `where`
  // names it. `sure` says that the patch's rules decide by this very Transformer Engine.
  function shown(patch, proof, core, te) {
    const own = runOn(proof, core);
    const plain = (run) => run && (run.verdict === FIXED ? { ...run, sure: true } : unmeasured(proof, run));
    if (!proof.te && !patch.by.includes(1)) return plain(own) || null;
    if (te === NO_TE) return null;
    if (data.beside[core] === te) return plain(own) || null;
    const state = stateOf(patch, core, te);
    const byTe = patch.by[0] === 1;
    let best = null;
    for (let other = 0; other < data.core.length; other += 1) {
      const run = runOn(proof, other), beside = data.beside[other];
      if (!run || run.verdict !== FIXED || stateOf(patch, other, beside) !== state) continue;
      const far = [Math.abs(other - core), Math.abs(beside - te)];
      const order = byTe ? far[1] * 100 + far[0] : far[0] * 100 + far[1];
      if (!best || order < best.order) best = { ...run, order, where: [other, beside], sure: byTe };
    }
    return best || (own ? unmeasured(proof, own) : null);
  }

  function unmeasured(proof, run) {
    if (run.verdict !== CANNOT_RUN) return null;
    return { reason: proof.gpu ? "it needs a GPU: shim prove --device cuda" : run.stock };
  }

  function concerned(patch, words, te) {
    const holds = (word) => word === "any" || (word === "te" && te !== NO_TE) || (word === "no-te" && te === NO_TE) ||
      (word !== "te" && word !== "no-te" && (words === null || words.has(word)));
    return patch.concerns.some((alternative) => alternative.every(holds));
  }

  const kindOf = (proof) => (proof.defect === "time" ? "memory" : proof.defect);

  function everything() {
    const { core, te, words } = choice;
    const found = { hit: [], unmeasured: [], other: [], right: [] };
    for (const patch of data.patches) {
      if (!applies(stateOf(patch, core, te))) {
        found.right.push(patch);
      } else if (!concerned(patch, words, te)) {
        found.other.push(patch);
      } else {
        const results = patch.proofs.map((proof) => ({ proof, said: shown(patch, proof, core, te) })).filter(({ said }) => said);
        const measured = results.filter(({ said }) => said.stock), rest = results.filter(({ said }) => said.reason);
        const pairs = patch.pairs.filter(([, cores, tes]) => te !== NO_TE && span(...cores, core) && span(...tes, te));
        if (!measured.length) found.unmeasured.push({ patch, rest });
        for (const kind of data.symptoms) {
          const own = measured.filter(({ proof }) => kindOf(proof) === kind);
          if (own.length) found.hit.push({ patch, kind, measured: own, rest, pairs, sure: own.some(({ said }) => said.sure) });
        }
      }
    }
    return found;
  }

  // ---- the address ----

  function toHash() {
    const parts = [`core=${data.core[choice.core]}`, `te=${choice.te === NO_TE ? "none" : data.te[choice.te]}`];
    if (choice.words) parts.push(`for=${WORDS.filter((word) => choice.words.has(word)).join(",")}`);
    return `#${parts.join("&")}`;
  }

  function fromHash() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const unknown = [];
    const place = (name, releases, otherwise) => {
      const found = releases.indexOf(asked.get(name));
      if (asked.has(name) && found < 0) unknown.push(`${name} ${asked.get(name)}`);
      return found < 0 ? otherwise : found;
    };
    choice.core = place("core", data.core, data.core.length - 1);
    choice.te = asked.get("te") === "none" ? NO_TE : place("te", data.te, data.beside[choice.core]);
    choice.words = null;
    if (asked.has("for")) {
      const words = asked.get("for").split(",").filter(Boolean);
      choice.words = new Set(words.filter((word) => WORDS.includes(word)));
      unknown.push(...words.filter((word) => !WORDS.includes(word)));
    }
    at("unknown").hidden = !unknown.length;
    at("unknown").textContent = `The address asks for what this page does not know: ${unknown.join(", ")}.`;
  }

  // ---- elements ----

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

  function command(text) {
    const shownText = element("pre", { tabindex: "0" }, text);
    const button = element("button", { type: "button", onclick: copy, "aria-label": `Copy: ${text.slice(0, 60)}` }, "Copy");
    async function copy() {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(shownText);  // a browser without a clipboard for files
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    }
    return element("div", { class: "command" }, shownText, button);
  }

  function linked(pieces) {
    return pieces.map(([text, address]) => (address ? element("a", { href: address }, text) : text));
  }

  function listOf(title, entries) {
    if (!entries.length) return [];
    return [element("h4", {}, title), element("ul", {}, ...entries.map((pieces) => element("li", {}, ...linked(pieces))))];
  }

  const pairOf = ([core, te]) => `megatron-core ${data.core[core]} with Transformer Engine ${data.te[te]}`;

  function sideOf(name, kind, text) {
    return element("div", { class: kind }, element("dt", {}, name), element("dd", {}, text));
  }

  function proofRow({ proof, said }, kind) {
    const other = proof.defect !== kind;
    return element("div", { class: `proof ${proof.defect}`, "data-proof": proof.label },
      element("p", {}, proof.what, ...(other ? [" ", element("span", { class: "tag" }, proof.defect)] : [])),
      element("dl", { class: "sides" }, sideOf("stock", "stock", said.stock), sideOf("with shim", "with", said.shim)),
      ...where(said));
  }

  function where(said) {
    return said.where ? [element("p", { class: "where" }, `Measured on ${pairOf(said.where)}.`)] : [];
  }

  function notRun(rest) {
    return rest.map(({ proof, said }) => element("li", {}, `${proof.what} Not run here: ${said.reason}.`));
  }

  function card({ patch, measured, rest, sure, pairs, kind }) {
    const [first] = measured, more = measured.length - 1, name = `${kind} ${patch.id}`;
    const page = `patches/${patch.id}${PAGE_ENDING}`;
    const title = more && patch.without && kind === patch.symptom ? patch.without : first.proof.what.replace(/\.$/, "");
    const made = element("details", { class: `card ${kind}${sure ? "" : " beside"}`, "data-patch": patch.id, open: opened.has(name) },
      element("summary", {},
        element("div", { class: "title" }, title),
        element("div", { class: "glance" },
          element("code", {}, patch.id),
          element("span", more ? {} : { "data-proof": first.proof.label },
            element("span", { class: "stock" }, first.said.stock), " \u2192 ", element("span", { class: "with" }, first.said.shim)),
          more ? element("span", {}, `and ${more} more`) : null,
          sure ? null : element("span", { class: "tag" }, "seen beside another Transformer Engine"))),
      element("div", { class: "body" },
        element("p", {}, `${patch.summary}. It changes ${patch.changes === "nothing" ? "no numbers" : patch.changes}.`),
        ...(more ? measured.map((result) => proofRow(result, kind)) : where(first.said)),
        ...(pairs.length ? [element("h4", {}, "These two releases together"),
          element("ul", {}, ...pairs.map(([note]) => element("li", {}, note)))] : []),
        ...(rest.length ? [element("h4", {}, "Not run"), element("ul", {}, ...notRun(rest))] : []),
        ...listOf("Upstream", patch.links),
        ...listOf("Reported in", patch.met),
        element("h4", {}, "See it on your machine, or switch on this patch alone"),
        command(`shim prove ${patch.id}`),
        command(`MEGATRON_SHIM_ONLY=${patch.id}`),
        element("p", {}, element("a", { href: page }, "The patch"), ", ",
          element("a", { href: `${page}#see-it` }, "a reproduction without shim"))));
    made.addEventListener("toggle", () => { opened[made.open ? "add" : "delete"](name); });
    return made;
  }

  function section(kind, hits) {
    const [name, meaning] = KINDS[kind];
    return element("section", { class: `kind ${kind}`, "data-kind": kind },
      element("h3", { id: `kind-${kind}`, tabindex: "-1" }, name), element("p", {}, meaning), ...hits.map(card));
  }

  function fold(title, ...children) {
    return element("details", {}, element("summary", {}, title), ...children);
  }

  function plainList(patches, more) {
    return element("ul", {}, ...patches.map((patch) => element("li", {}, element("code", {}, patch.id), `: ${more(patch)}`)));
  }

  // What megatron-core goes without, because this Transformer Engine lacks a name.
  function lost() {
    const here = data.lost.filter(([, , spans]) => choice.te !== NO_TE &&
      spans.some(([first, number, bits]) => span(first, number, choice.core) && Math.floor(bits / 2 ** choice.te) % 2));
    if (!here.length) return [];
    const restored = here.filter(([, patch]) => patch).length;
    const title = `${count(here.length, "feature")} that megatron-core silently loses beside this Transformer Engine, ` +
      `${restored} of which shim restores`;
    return [fold(title, element("ul", { id: "lost" }, ...here.map(([what, patch]) =>
      element("li", {}, what, ...(patch ? [" (restored by ", element("code", {}, patch), ")"] : [])))))];
  }

  const alternatives = (patch) => patch.concerns.map((words) => words.join("+")).join(" or ");

  function rest(found) {
    const ids = [...new Set(found.hit.map(({ patch }) => patch.id))];
    const picked = WORDS.filter((word) => choice.words && choice.words.has(word));
    return element("section", { class: "rest" },
      ...(ids.length ? [
        element("h3", {}, "All of them together"),
        element("p", {}, "Two lines in your trainer fix them, and whatever else your releases need:"),
        command("import shim\nshim.apply()"),
        ...(picked.length ? [
          element("p", {}, "What shim would do on the machine that trains:"),
          command(`shim plan --for ${picked.join(",")}`),
        ] : []),
        element("p", {}, "See them on your machine, or switch on these and no other patch:"),
        command(`shim prove ${ids.join(" ")}`),
        command(`MEGATRON_SHIM_ONLY=${ids.join(",")} shim run -- python train.py`),
      ] : []),
      ...lost(),
      ...(found.unmeasured.length ? [fold(`${count(found.unmeasured.length, "patch", "patches")} for this choice without a number`,
        ...found.unmeasured.map(({ patch, rest: unrun }) => element("div", {}, element("p", {}, element("code", {}, patch.id), `: ${patch.summary}.`),
          element("ul", {}, ...notRun(unrun)))))] : []),
      ...(found.other.length ? [fold(`${count(found.other.length, "patch", "patches")} for runs of another kind`,
        plainList(found.other, (patch) => `${patch.summary} (${alternatives(patch)})`))] : []),
      ...(found.right.length ? [fold(`${count(found.right.length, "patch", "patches")} that these releases do not need`,
        plainList(found.right, (patch) => patch.summary))] : []));
  }

  function tell(found) {
    const defects = found.hit.flatMap(({ measured }) => measured);
    const sure = defects.filter(({ said }) => said.sure).length, others = defects.length - sure;
    const picked = WORDS.filter((word) => choice.words && choice.words.has(word));
    const run = picked.length ? `a run with ${picked.join(", ")}` : "a dense model on one GPU";
    at("said").textContent = choice.words === null ? `${count(sure, "defect")} in these releases.`
      : `${count(sure, "defect")} ${sure === 1 ? "hits" : "hit"} ${run}.`;
    const te = choice.te === NO_TE ? "without Transformer Engine" : `with Transformer Engine ${data.te[choice.te]}`;
    const patches = new Set(found.hit.map(({ patch }) => patch)).size;
    at("more").textContent = [
      `megatron-core ${data.core[choice.core]} ${te}.`,
      others ? `${others} more ${others === 1 ? "was" : "were"} seen beside another Transformer Engine.` : "",
      patches ? `shim fixes ${defects.length === 1 ? "it" : "them"} with ${count(patches, "patch", "patches")}.` : "",
      choice.words === null ? "Tick what you train, to see what concerns you." : "",
    ].filter(Boolean).join(" ");
  }

  function total(kind, hits) {
    const defects = hits.reduce((sum, { measured }) => sum + measured.length, 0);
    const go = () => {
      const heading = at(`kind-${kind}`);
      heading.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      heading.focus({ preventScroll: true });
    };
    return element("button", { type: "button", class: `total ${kind}`, "data-total": kind, disabled: !hits.length, onclick: go },
      element("b", {}, String(defects)), KINDS[kind][0]);
  }

  // ---- the choice ----

  function chosen() {
    location.replace(toHash());  // keeps one entry in the history; hashchange does the rest
    render();
  }

  function choose(words) {
    choice.words = words;
    chosen();
  }

  function tick(event) {
    const words = new Set(choice.words || []);
    words[event.target.checked ? "add" : "delete"](event.target.value);
    choose(words);
  }

  function build() {
    const options = (releases) => releases.map((release, place) => element("option", { value: place }, release)).reverse();
    at("core").append(...options(data.core));
    at("te").append(element("option", { value: NO_TE }, "not installed"), ...options(data.te));
    at("core").addEventListener("change", (event) => {
      const beside = choice.te === data.beside[choice.core];
      choice.core = Number(event.target.value);
      if (beside) choice.te = data.beside[choice.core];  // the one of its time, unless another was chosen
      chosen();
    });
    at("te").addEventListener("change", (event) => { choice.te = Number(event.target.value); chosen(); });
    at("presets").append(...[["Everything", null], ...data.presets].map(([name, words]) =>
      element("button", { type: "button", "data-words": words === null ? "*" : words.join(","), onclick: () => choose(words && new Set(words)) }, name)));
    at("groups").append(...data.words.map(([group, words]) => element("details", { class: "group" },
      element("summary", {}, group, element("span", { class: "picked" })),
      ...words.map(([word, meaning]) => element("label", { class: "word" },
        element("input", { type: "checkbox", value: word, onchange: tick }), element("span", {}, meaning))))));
    const wide = matchMedia("(min-width: 46.01rem)");
    const unfold = () => { for (const group of document.querySelectorAll(".group")) group.open = wide.matches; };
    wide.addEventListener("change", unfold);
    unfold();
    at("choice").addEventListener("submit", (event) => event.preventDefault());
    addEventListener("hashchange", () => { if (location.hash !== toHash()) { fromHash(); render(); } });
  }

  function render() {
    at("core").value = choice.core;
    at("te").value = choice.te;
    for (const option of at("te").options) {
      const usual = Number(option.value) === data.beside[choice.core];
      if (Number(option.value) !== NO_TE) option.textContent = data.te[option.value] + (usual ? " (measured)" : "");
    }
    for (const box of document.querySelectorAll(".word input")) box.checked = Boolean(choice.words && choice.words.has(box.value));
    for (const group of document.querySelectorAll(".group")) {
      const picked = [...group.querySelectorAll("input:checked")].map((box) => box.value);
      group.querySelector(".picked").textContent = picked.length ? ` \u00b7 ${picked.join(", ")}` : "";
    }
    const words = choice.words === null ? "*" : WORDS.filter((word) => choice.words.has(word)).join(",");
    for (const button of at("presets").children) {
      const own = button.dataset.words === "*" ? "*" : WORDS.filter((word) => button.dataset.words.split(",").includes(word)).join(",");
      button.setAttribute("aria-pressed", own === words);
    }
    const found = everything();
    found.hit.sort((one, other) => other.sure - one.sure);
    tell(found);
    const of = (kind) => found.hit.filter((hit) => hit.kind === kind);
    at("totals").replaceChildren(...data.symptoms.map((kind) => total(kind, of(kind))));
    at("found").replaceChildren(...data.symptoms.filter((kind) => of(kind).length).map((kind) => section(kind, of(kind))), rest(found));
  }

  build();
  fromHash();
  render();
})();
